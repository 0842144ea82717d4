"""The CUDA accelerator's decisions, on a machine that torch is made to see: no kernel runs here."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from forge_accel import AccelError, CUDAAccelerator, ROCMAccelerator, accelerator, device_count, document_attention


@pytest.fixture
def gpus(monkeypatch):
    """Let torch see GPUs of a name, memory and age; returns what was set on them."""

    def make(
        name="NVIDIA H100 80GB HBM3", gib=79.6, count=2, native=True, hip=None, capability=(9, 0), nccl=True, allocator=False
    ):
        record = {}
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if not (set(os.environ) & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} or allocator):
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # or the accelerator would set one, which would stay
        monkeypatch.setattr(torch.version, "cuda", None if hip else "12.8")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: record.update(current=index))
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: record.update(cudnn_attention=enabled))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        properties = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
        return record

    return make


def test_auto_takes_the_gpu_that_is_there(gpus):
    """CUDA comes before the CPU, and the reason says what torch saw."""
    record = gpus()
    acc = accelerator()
    assert isinstance(acc, CUDAAccelerator)
    assert acc.device.value == torch.device("cuda:0")
    assert acc.device.reason == "cuda:0: torch sees 2 GPU(s) through CUDA 12.8"
    assert record == {"current": 0, "cudnn_attention": False}
    assert acc.machine == "NVIDIA H100 80GB HBM3, 80 GiB, CUDA 12.8"


def test_a_rank_takes_its_own_gpu(gpus, monkeypatch):
    """LOCAL_RANK decides, an index in the name decides over it, and one that is not there is an error."""
    record = gpus()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert accelerator("cuda").device.value.index == record["current"] == 1
    assert accelerator("cuda:0").device.value.index == record["current"] == 0
    with pytest.raises(AccelError, match="cuda:2.*sees 2"):
        accelerator("cuda:2")
    monkeypatch.setenv("LOCAL_RANK", "5")
    with pytest.raises(AccelError, match="LOCAL_RANK=5.*sees 2"):
        accelerator("cuda")
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(AccelError, match="LOCAL_RANK='first'"):
        accelerator("cuda")


def test_bf16_where_the_chip_has_it(gpus):
    """auto is bfloat16 on a chip that computes it, float32 on one that emulates it; asked for there, the reason warns."""
    gpus()
    assert accelerator("cuda").dtype("auto").value == torch.bfloat16
    assert "WARNING" not in accelerator("cuda").dtype("bfloat16").reason
    gpus(name="Tesla T4", native=False, capability=(7, 5))
    old = accelerator("cuda")
    assert old.dtype("auto").value == torch.float32
    assert "Tesla T4" in old.dtype("auto").reason
    assert "WARNING" in old.dtype("bfloat16").reason
    assert "WARNING" not in old.dtype("float32").reason


def test_documents_take_the_kernel_in_bf16_alone(gpus):
    """bfloat16 on a recent NVIDIA chip gets torch's kernel; whatever else gets SDPA by samples, and the reason says why."""
    gpus()
    acc = accelerator("cuda")
    fast = acc.attention("auto", torch.bfloat16)
    assert fast.value.name == "documents"
    assert fast.value.function is not document_attention
    assert acc.attention("documents", torch.float32).value.function is document_attention
    assert "does not take float32" in acc.attention("auto", torch.float32).reason
    gpus(capability=(7, 5), name="Tesla T4")
    assert "Tesla T4" in accelerator("cuda").attention("auto", torch.bfloat16).reason
    gpus(hip="6.4", name="AMD Instinct MI300X")
    rocm = accelerator("cuda").attention("auto", torch.bfloat16)
    assert rocm.value.function is document_attention
    assert "ROCm" in rocm.reason


def test_a_torch_without_the_kernel_goes_by_samples(gpus, monkeypatch):
    """An old torch is no error, and the log says what is missing."""
    gpus()
    monkeypatch.setattr("forge_accel.devices._cuda.find_kernel", lambda: None)
    choice = accelerator("cuda").attention("auto", torch.bfloat16)
    assert choice.value.function is document_attention
    assert "has no variable-length flash kernel" in choice.reason


def test_rocm_is_a_device_of_its_own_that_torch_calls_cuda(gpus):
    """On a torch that is built for ROCm, auto, rocm and cuda are the same GPUs; the reasons say ROCm."""
    gpus(hip="6.4", name="AMD Instinct MI300X")
    for name in ("auto", "rocm", "cuda"):
        acc = accelerator(name)
        assert isinstance(acc, ROCMAccelerator)
        assert acc.device.value.type == "cuda"
    assert "ROCm 6.4" in accelerator().device.reason
    assert "ROCm 6.4" in acc.machine
    assert "RCCL" in acc.collective_backend.reason
    assert acc.peak_flops(torch.bfloat16) == 1307e12
    assert accelerator("rocm:1").device.value.index == 1
    assert acc.support.value == "declared"
    gpus()
    with pytest.raises(AccelError, match="'rocm' is not there: torch .* is built without ROCm"):
        accelerator("rocm")


def test_blocks_are_compiled_where_that_was_measured(gpus):
    """auto compiles on NVIDIA's GPUs, and on no other; off is off."""
    gpus()
    seen = accelerator("cuda")
    assert seen.support.value == "exercised"
    assert [seen.compiling(asked).value for asked in ("auto", "blocks", "off")] == ["inductor", "inductor", None]
    with pytest.raises(AccelError, match="compile='model' is unknown"):
        seen.compiling("model")
    gpus(hip="6.4", name="AMD Instinct MI300X")
    assert [accelerator("cuda").compiling(asked).value for asked in ("auto", "blocks")] == [None, "inductor"]


def test_the_devices_of_one_name_are_counted(gpus):
    """`device_count` says how many processes of their own a device can serve: all GPUs, one that is named, and no CPU."""
    gpus(count=2)
    assert (device_count("cuda"), device_count("cuda:1"), device_count("auto"), device_count("cpu")) == (2, 1, 2, 0)


@pytest.mark.parametrize("nccl", [True, False])
def test_the_backend_is_nccl_where_torch_has_it(gpus, nccl):
    """Without NCCL it is gloo, and the reason says so."""
    gpus(nccl=nccl)
    assert accelerator("cuda").collective_backend.value == ("cpu:gloo,cuda:nccl" if nccl else "gloo")


@pytest.mark.parametrize(
    ("gib", "tokens"),
    [(0.5, 1024), (6, 1024), (15, 1024), (23.6, 2048), (39.5, 4096), (79.6, 8192), (139, 16384), (288, 16384)],
)
def test_more_memory_suggests_more_tokens(gpus, gib, tokens):
    """A power of two that memory holds comfortably."""
    gpus(gib=gib)
    assert accelerator("cuda").default_tokens == tokens
    assert accelerator("cuda").most_tokens is None


def test_float32_peak_is_unknown_under_tf32(gpus):
    """The float32 figure holds for float32 alone."""
    gpus()
    acc = accelerator("cuda")
    assert acc.peak_flops(torch.bfloat16) == 989e12
    assert acc.peak_flops(torch.float32) == 67e12
    assert acc.peak_flops(torch.float64) is None
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert acc.peak_flops(torch.float32) is None
    finally:
        torch.set_float32_matmul_precision(before)
    gpus(name="NVIDIA T600")
    assert accelerator("cuda").peak_flops(torch.bfloat16) is None


def test_memory_generators_and_waiting_are_its_own_device(gpus, monkeypatch):
    """Peak, reset, RNG state and synchronize are all asked of the one device."""
    gpus()
    calls = []
    state = torch.tensor([1, 2, 3], dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: calls.append(("peak", index)) or 123)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda index: calls.append(("reset", index)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: calls.append(("wait", index)))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, index: calls.append((value.tolist(), index)))
    acc = accelerator("cuda:1")
    assert acc.peak_memory_bytes() == 123
    assert acc.reset_peak_memory() is True
    acc.synchronize()
    found = acc.rng_state()
    assert set(found) == {"cpu", "cuda"}
    acc.set_rng_state(found)
    assert calls == [("peak", 1), ("reset", 1), ("wait", 1), ([1, 2, 3], 1)]
    with pytest.raises(AccelError, match="cpu, cuda"):
        acc.set_rng_state({"cpu": found["cpu"]})


@pytest.mark.parametrize(
    ("cuda", "hidden", "said"),
    [
        (None, None, "is built"),
        ("12.8", None, "no GPU or no driver"),
        ("12.8", "", "CUDA_VISIBLE_DEVICES=''"),
    ],
)
def test_cuda_where_there_is_none_says_what_torch_sees(monkeypatch, cuda, hidden, said):
    """A torch without CUDA and a machine without a GPU are distinguished; auto takes the CPU, with the same reason."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(AccelError, match=f"device='cuda' is not there: .*{said}"):
        accelerator("cuda")
    fallback = accelerator("auto")
    assert fallback.name == "cpu"
    assert said in fallback.device.reason


def test_rocm_where_there_is_none_names_what_hides_it(monkeypatch):
    """ROCm has two variables of its own that hide GPUs, beside CUDA's."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "")
    with pytest.raises(AccelError, match=r"sees no GPU or no driver \(HIP_VISIBLE_DEVICES='7', ROCR_VISIBLE_DEVICES=''\)"):
        accelerator("rocm")


def test_four_bits(gpus, monkeypatch):
    """Every chip since Pascal holds them; an older one is refused by its name, and ROCm is said to be untried."""
    monkeypatch.setattr("forge_accel.devices._quantization.version", lambda _: "0.50.2")
    gpus()
    assert accelerator("cuda").quantization("nf4").reason == (
        "nf4: bitsandbytes 0.50.2 holds the frozen weights in 4 bits on NVIDIA H100 80GB HBM3"
    )
    gpus(name="Quadro M6000", capability=(5, 2))
    with pytest.raises(AccelError, match=r"on Quadro M6000, of compute capability 5\.2 \(6\.0 is needed\)\..*use device=cpu"):
        accelerator("cuda").quantization("nf4")
    gpus(name="AMD Instinct MI300X", hip="6.4")
    assert accelerator("cuda").quantization("fp4").reason.endswith("untried on ROCm")


def test_segments_grow_unless_somebody_configured_them(gpus, monkeypatch):
    """The allocator's variable is set before the GPU is used, and neither over another value, nor late, nor on ROCm."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

    def after(given=None, *, used=False, **machine):
        for name in names:
            monkeypatch.setenv(name, "")  # so that it is put back
            monkeypatch.delenv(name)
        if given is not None:
            monkeypatch.setenv(given, "max_split_size_mb:64")
        gpus(allocator=True, **machine)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
        accelerator("cuda")
        return [os.environ.get(name) for name in names]

    assert after() == [None, "expandable_segments:True", None]
    assert after(used=True) == [None, None, None]
    assert after(hip="6.4") == [None, None, None]
    for number, name in enumerate(names):
        assert after(name) == [("max_split_size_mb:64" if number == k else None) for k in range(3)]


def test_what_a_run_asks_of_a_large_gpu(gpus, monkeypatch):
    """Reserved memory is a figure of its own; batches are pinned; logits of 2,048 rows fit on large chips alone."""
    gpus(gib=139.8)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: 456 + index)
    assert (accelerator("cuda:1").peak_reserved_bytes(), accelerator("cuda").pins_memory) == (457, True)
    assert accelerator("cuda").head_rows == 2048
    gpus(name="NVIDIA T600", gib=4)
    assert accelerator("cuda").head_rows == 512
    host = accelerator("cpu")
    assert (host.peak_reserved_bytes(), host.pins_memory, host.head_rows) == (None, False, 512)
