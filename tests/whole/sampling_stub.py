"""A small sampling server: the routes of vLLM and SGLang that forge calls, a real model, and faults on demand.

What it answers as SGLang has the fields that SGLang 0.5.23 itself answered (`interfaces/sampling_servers.json`, "answers").
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import threading
import time
from contextlib import contextmanager
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoProcessor, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}


class Stub:
    """State of a server: its model, what was asked of it, and how it misbehaves."""

    def __init__(self, kind: str, model_path: str, *, fault: str = "", images: bool = False) -> None:
        self.kind, self.path, self.fault = kind, model_path, fault
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        self.auto: Any = AutoModelForMultimodalLM if images else AutoModelForCausalLM
        self.model: Any = self.auto.from_pretrained(model_path, dtype=torch.float32).eval()
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.answered: list[tuple[str, Any]] = []
        self.loaded: list[str] = []
        self.weight_version = "default"
        self.resets = 0
        self.adapters: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.requests = itertools.count()
        self.context = 8 if fault == "short" else 512

    def answer(self, method: str, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Answer a request: (status, JSON or a sentence)."""
        self.asked.append((method, route, body))
        name = route.partition("?")[0].strip("/").replace("/", "_")
        handler = getattr(self, f"{method.lower()}_{name}", None)
        if handler is None:
            return 404, {"error": f"no route {method} {route}"}
        status, found = handler(body)
        self.answered.append((f"{method} {route.partition('?')[0]}", found))
        return status, found

    # Both
    def post_tokenize(self, body: Any) -> Any:
        ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
        ids = [i + 1 for i in ids] if self.fault == "wrong model" else ids
        return 200, {"tokens": ids, "count": len(ids), "max_model_len": self.context}

    # vLLM
    def get_v1_models(self, _body: Any) -> Any:
        return 200, {"data": [{"id": "served", "root": self.path, "max_model_len": self.context}]}

    def get_version(self, _body: Any) -> Any:
        return 200, {"version": "0.6.1" if self.fault == "old" else VERSIONS["vllm"]}

    def post_pause(self, _body: Any) -> Any:
        return 200, {"status": "paused"}

    def post_resume(self, _body: Any) -> Any:
        return 200, {"status": "resumed"}

    def post_reset_prefix_cache(self, _body: Any) -> Any:
        self.resets += 1
        return 200, {"success": self.fault != "stale prompts" and (self.fault != "busy" or self.resets % 3 == 0)}

    def post_update_weight_version(self, body: Any) -> Any:
        if self.fault != "restarted":
            self.weight_version = body["new_version"]
        return 200, {"success": True, "new_version": body["new_version"]}

    def post_collective_rpc(self, body: Any) -> Any:
        assert body["method"] == "reload_weights"
        self.load(body["kwargs"]["weights_path"])
        return 200, {"results": [None]}

    def post_v1_load_lora_adapter(self, body: Any) -> Any:
        self.load_adapter(body["lora_name"], body["lora_path"])
        return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def post_v1_unload_lora_adapter(self, body: Any) -> Any:
        del self.adapters[body["lora_name"]]
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def likeliest(self, ids: list[int], k: int) -> list[Any]:
        """The k likeliest tokens and the one that is there, with log-probabilities, in the place of each but the first."""
        with torch.no_grad():
            logps = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)[:-1]
        values, tokens = logps.topk(min(k, 5) if self.fault == "few" else k)
        tops = [dict(zip(*each, strict=True)) for each in zip(tokens.tolist(), values.tolist(), strict=True)]
        return [top | {own: logps[at, own].item()} for at, (top, own) in enumerate(zip(tops, ids[1:], strict=True))]

    def post_v1_completions(self, body: Any) -> Any:
        if "prompt_logprobs" in body:
            places = self.likeliest(body["prompt"], body["prompt_logprobs"])
            said = [{str(token): {"logprob": logp, "rank": 1} for token, logp in place.items()} for place in places]
            return 200, {"choices": [{"index": 0, "text": "x", "prompt_logprobs": [None, *said]}]}
        return self.choices(body["model"], body["prompt"], {}, body)

    def post_inference_v1_generate(self, body: Any) -> Any:
        if self.fault == "no scale-out":
            return 403, {
                "error": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            }
        kinds = {part["type"].removesuffix("_url") for part in body["content_parts"]}
        assert all(part["url"].startswith(tuple(f"data:{kind}/" for kind in kinds)) for part in body["content_parts"])
        prompt, images = self.expanded(body["token_ids"], [part["url"] for part in body["content_parts"]])
        status, found = self.choices(body["model"], prompt, images, body["sampling_params"])
        for choice in found["choices"]:
            pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
            choice["logprobs"] = {"content": [{"token_id": token, "logprob": logp, "rank": 1} for token, logp in pairs]}
        return status, found | {"prompt_token_ids": self.told(prompt) if body["return_token_ids"] else None}

    def told(self, prompt: list[int]) -> list[int] | None:
        """The tokens of a prompt with images, as an answer has them."""
        return None if self.fault == "says nothing" else [*prompt[:4], *prompt[3:]] if self.fault == "other limits" else prompt

    @cached_property
    def processor(self) -> Any:
        """The processor of the directory that is served."""
        return AutoProcessor.from_pretrained(self.path)

    def expanded(self, ids: list[int], urls: Sequence[str]) -> tuple[list[int], dict[str, Any]]:
        """What the model's processor makes of a prompt with placeholders: its tokens, and a forward's further arguments."""
        if urls[0].startswith("data:video/"):
            return self.filmed(ids, urls)
        names = ("boi_token", "image_token", "audio_token")
        placeholder = next(found for name in names if (found := getattr(self.processor, name, None)))
        token = self.tokenizer.convert_tokens_to_ids(placeholder)
        assert ids.count(token) == len(urls)
        media = [self.decoded(url) for url in urls]
        if self.fault == "swapped images":
            media.reverse()
        made = dict(self.processor(text=[placeholder * len(media)], **self.given(media), return_tensors="pt"))
        alone = iter([self.processor(text=[placeholder], **self.given([one]))["input_ids"][0] for one in media])
        prompt = [int(each) for own in ids for each in (next(alone) if own == token else [own])]
        of_tokens = {
            name: torch.tensor(self.processor.create_mm_token_type_ids([prompt]))
            for name in made
            if name.endswith("token_type_ids")
        }
        dropped = {"input_ids", "attention_mask", *of_tokens}
        return prompt, {name: value for name, value in made.items() if name not in dropped} | of_tokens

    def filmed(self, ids: list[int], urls: Sequence[str]) -> tuple[list[int], dict[str, Any]]:
        """The same of videos, of which transformers reads the files, and their model's processor chooses frames."""
        placeholder = self.processor.video_token

        def made(urls: Sequence[str]) -> dict[str, Any]:
            with TemporaryDirectory() as folder:
                files = [Path(folder) / f"{at}.mp4" for at in range(len(urls))]
                for file, url in zip(files, urls, strict=True):
                    file.write_bytes(base64.b64decode(url.removeprefix("data:video/mp4;base64,"), validate=True))
                asked = [{"role": "user", "content": [{"type": "video", "video": str(file)} for file in files]}]
                own = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
                return dict(self.processor.apply_chat_template(asked, placeholder * len(urls), **own))

        token = self.tokenizer.convert_tokens_to_ids(placeholder)
        assert ids.count(token) == len(urls)
        alone = iter([made([url])["input_ids"][0] for url in urls])
        prompt = [int(each) for own in ids for each in (next(alone) if own == token else [own])]
        arrays = {name: value for name, value in made(urls).items() if name not in ("input_ids", "attention_mask")}
        return prompt, arrays | {"mm_token_type_ids": torch.tensor(self.processor.create_mm_token_type_ids([prompt]))}

    def decoded(self, url: str) -> Any:
        """An image, or samples at the processor's rate."""
        head, _, data = url.partition(",")
        file = io.BytesIO(base64.b64decode(data, validate=True))
        if head == "data:audio/wav;base64":
            import soundfile  # not everywhere that images are

            samples, rate = soundfile.read(file, dtype="float32")
            assert (samples.ndim, rate) == (1, self.processor.feature_extractor.sampling_rate)
            return samples[::-1].copy() if self.fault == "another image" else samples
        from PIL import Image

        assert head == "data:image/png;base64"
        picture = Image.open(file)
        assert picture.mode == "RGB"
        return picture.rotate(90) if self.fault == "another image" else picture

    @staticmethod
    def given(media: list[Any]) -> dict[str, Any]:
        """Arguments of a processor for one text."""
        return {"images": [media]} if hasattr(media[0], "mode") else {"audio": media, "sampling_rate": 16_000}

    def choices(self, name: str, prompt: list[int], images: dict[str, Any], own: dict[str, Any]) -> Any:
        """What both routes of vLLM answer."""
        choices: list[dict[str, Any]] = []
        model = self.adapters.get(name, self.model)
        assert name in {"served", *self.adapters}
        for index in range(own["n"]):
            ids, logps, stopped = self.draw(model, prompt, own, own["max_tokens"], own["seed"] + index, images)
            choices.append(
                {
                    "index": index,
                    "token_ids": ids,
                    "logprobs": {"token_logprobs": logps},
                    "finish_reason": "stop" if stopped else "length",
                    "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
                }
            )
        if self.fault == "reordered":
            choices.reverse()
        if self.fault == "missing":
            choices.pop()
        return 200, {"choices": choices}

    # SGLang
    def get_server_info(self, _body: Any) -> Any:
        if self.fault == "bare":
            return 200, {"version": VERSIONS["sglang"]}
        return 200, {
            "version": "0.4.1" if self.fault == "old" else VERSIONS["sglang"],
            "enable_deterministic_inference": self.fault == "seeded",
            "max_req_input_len": self.context - 6,
        }

    def get_model_info(self, _body: Any) -> Any:
        return 200, {"model_path": self.path, "weight_version": self.weight_version}

    def post_update_weights_from_disk(self, body: Any) -> Any:
        self.load(body["model_path"])
        if self.fault != "restarted":
            self.weight_version = body["weight_version"]
        said = f"Succeeded to update model weights. Weight version updated to {self.weight_version}."
        return 200, {"success": True, "message": said, "num_paused_requests": 0}

    def post_load_lora_adapter(self, body: Any) -> Any:
        self.load_adapter(body["lora_name"], body["lora_path"])
        return 200, self.adapters_now()

    def post_unload_lora_adapter(self, body: Any) -> Any:
        del self.adapters[body["lora_name"]]
        return 200, self.adapters_now()

    def adapters_now(self) -> dict[str, Any]:
        """What SGLang answers once it has taken or forgotten an adapter."""
        loaded = dict.fromkeys(self.adapters, self.path)
        return {"rid": None, "http_worker_ipc": None, "success": True, "error_message": "", "loaded_adapters": loaded}

    def post_generate(self, body: Any) -> Any:
        if "logprob_start_len" in body:
            places = self.likeliest(body["input_ids"], body["top_logprobs_num"])
            said = [[[logp, token, None] for token, logp in place.items()] for place in places]
            return 200, {"text": "x", "meta_info": {"input_top_logprobs": [None, *said]}}
        model = self.adapters[body["lora_path"]] if "lora_path" in body else self.model
        several = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if several else [body["input_ids"]]
        sampling = body["sampling_params"]
        sampling = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        media = body.get("image_data") or body.get("audio_data") or []
        given = [self.expanded(*each) for each in zip(prompts, media, strict=True)] if media else []
        # A seed counts where it draws by seeds alone, and is that of all completions of a request.
        found = [
            self.generated(model, *each, own, own["sampling_seed"] if self.fault == "seeded" else next(self.requests))
            for each, own in zip(given or [(prompt, {}) for prompt in prompts], sampling, strict=True)
            for _ in range(own["n"])
        ]
        if given and body["return_prompt_token_ids"] and (told := self.told(given[0][0])) is not None:
            found = [one | {"prompt_token_ids": told} for one in found]
        return 200, found if several or len(found) > 1 else found[0]

    def generated(
        self, model: Any, prompt: list[int], images: dict[str, Any], own: dict[str, Any], seed: int
    ) -> dict[str, Any]:
        """One completion as SGLang gives it."""
        most = min(own["max_new_tokens"], self.context - 2 - len(prompt))
        ids, logps, stopped = self.draw(model, prompt, own, most // 2 if self.fault == "limits" else most, seed, images)
        reason: dict[str, Any] = {"type": "stop", "matched": ids[-1]} if stopped else {"type": "length", "length": len(ids)}
        if self.fault == "length first" and len(ids) == most:
            reason = {"type": "length", "length": most}
        if self.fault == "aborts":
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        versions = [{"version": self.weight_version, "start": 0, "end": len(ids)}]
        if self.fault == "mixes":
            versions = [
                {"version": "former", "start": 0, "end": 1},
                {"version": self.weight_version, "start": 1, "end": len(ids)},
            ]
        meta = {
            "id": "0",
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": self.weight_version,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[logp, token, None] for token, logp in zip(ids, logps, strict=True)],
            "output_token_logprobs_length": len(ids),
            "reasoning_tokens": 0,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_versions": versions,
            "cached_tokens_details": {"device": 0, "host": 0},
            "dp_rank": None,
            "e2e_latency": 0.1,
            "response_sent_to_client_ts": 0.0,
        }
        if self.fault == "bare":
            meta = {name: meta[name] for name in ("finish_reason", "output_token_logprobs")}
        return {"text": self.tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}

    def load(self, path: str) -> None:
        """Read all weights of a directory, as a server does."""
        self.loaded.append(path)
        if self.fault != "wrong weights":
            self.model = self.auto.from_pretrained(path, dtype=torch.float32).eval()
        elif len(self.loaded) > 1:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(6)

    def load_adapter(self, name: str, path: str) -> None:
        """Read an adapter onto the base."""
        from peft import PeftModel

        self.loaded.append(path)
        self.adapters[name] = PeftModel.from_pretrained(self.auto.from_pretrained(self.path, dtype=torch.float32), path).eval()

    def draw(
        self, model: Any, prompt: list[int], own: dict[str, Any], most: int, seed: int, images: dict[str, Any]
    ) -> tuple[list[int], list[float], bool]:
        """Draw a completion naively: a whole forward a token."""
        assert own["top_p"] == 1.0
        assert own["top_k"] == -1
        if self.fault == "late":
            time.sleep(30)
        random = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        logps: list[float] = []
        with self.lock, torch.no_grad():
            while len(ids) < most:
                given = {
                    name: torch.cat([array, array.new_zeros(1, len(ids))], 1) if array.shape == (1, len(prompt)) else array
                    for name, array in images.items()
                }
                logits = model(input_ids=torch.tensor([[*prompt, *ids]]), **given).logits[0, -1].float()
                for token, bias in own.get("logit_bias", {}).items():
                    logits[int(token)] += bias
                logits = logits / (own["temperature"] or 1.0)
                drawn = torch.multinomial(logits.softmax(-1), 1, generator=random) if own["temperature"] else logits.argmax()
                ids.append(int(drawn))
                logps.append(float(logits.log_softmax(-1)[ids[-1]]) - (0.05 if self.fault == "off by a little" else 0.0))
                if ids[-1] in own["stop_token_ids"]:
                    return ids, logps, True
        return ids, logps, False


@contextmanager
def served(kind: str, model_path: Path | str, *, fault: str = "", images: bool = False) -> Iterator[tuple[str, Stub]]:
    """Serve a model on a free port of this machine, with its vision tower for `images`: its address and its state."""
    stub = Stub(kind, str(model_path), fault=fault, images=images)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply("GET", {})

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.reply("POST", json.loads(text or b"{}"))

        def reply(self, method: str, body: dict[str, Any]) -> None:
            if stub.fault == "dead" and len(stub.loaded) > 1:
                self.connection.close()
                return
            status, found = stub.answer(method, self.path, body)
            # A sentence is sent as it is, as vLLM does.
            text = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text) + (stub.fault == "torn")))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # of 5 connections more are reset, where several come at once

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
