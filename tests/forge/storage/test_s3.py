"""The copy of a run directory at s3://, against a server on loopback that answers as S3 does."""

import importlib.util
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

import pytest

import forge_data
from forge.storage._remote import Remote
from forge.storage._storage import Storage
from forge.storage._upload import Upload

from .test_storage import a_run, content, put, step

# Looked for, not imported: that takes half a second of every process that collects the tests.
if importlib.util.find_spec("s3fs") is None:
    pytest.skip("s3fs, the extra s3 of forge-llm, is not installed", allow_module_level=True)


class Bucket(BaseHTTPRequestHandler):
    """Objects of one bucket: put, get, head, delete, list."""

    objects: dict[str, bytes] = {}
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Print nothing."""

    @property
    def key(self):
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.key:
            return self.answer(409)  # the bucket is there
        self.objects[self.key] = body
        return self.answer(200, ETag='"0"')

    def do_HEAD(self):
        if not self.key:
            return self.answer(200)
        if self.key not in self.objects:
            return self.answer(404)
        return self.send_object()

    def do_GET(self):
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query, keep_blank_values=True))
        if "list-type" in query:
            return self.answer(200, self.listed(query).encode(), Content_Type="application/xml")
        if self.key not in self.objects:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>", Content_Type="application/xml")
        return self.send_object()

    def send_object(self):
        data, given = self.objects[self.key], self.headers.get("Range")
        first, last = 0, len(data) - 1
        if given:
            begin, _, end = given.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or last), last)
        part = data[first : last + 1]
        self.send_response(206 if given else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 10:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(part)

    def listed(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        names = sorted(name for name in self.objects if name.startswith(prefix))
        folders = set()
        if delimiter:
            deeper = [name for name in names if delimiter in name[len(prefix) :]]
            folders = {prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter for name in deeper}
            names = [name for name in names if name not in deeper]
        found = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size><ETag>0</ETag>"
            "<LastModified>2026-11-23T10:00:00.000Z</LastModified></Contents>"
            for name in names
        )
        shared = "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders))
        count = len(names) + len(folders)
        return (
            f"<ListBucketResult><KeyCount>{count}</KeyCount><IsTruncated>false</IsTruncated>{found}{shared}</ListBucketResult>"
        )

    def do_DELETE(self):
        self.objects.pop(self.key, None)
        return self.answer(204)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        assert "delete" in urllib.parse.urlsplit(self.path).query
        for part in body.split("<Key>")[1:]:
            self.objects.pop(part.partition("</Key>")[0], None)
        return self.answer(200, b"<DeleteResult></DeleteResult>", Content_Type="application/xml")


@pytest.fixture
def bucket(monkeypatch):
    """The objects of the bucket `bucket`, which s3fs reaches."""
    import s3fs

    Bucket.objects = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield Bucket.objects
    s3fs.S3FileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()
    thread.join(30)


@pytest.mark.slow
def test_a_run_goes_to_s3_and_comes_back(bucket, tmp_path):
    """Copied, pruned, fetched again: what is at s3:// is what is in the run directory, and other objects stay."""
    bucket["other/cat.png"] = b"cat"
    run = a_run(tmp_path / "run")
    upload = Upload(Remote("s3://bucket/runs/first"), run, "abc", lambda _: None)
    upload.take()
    for number in range(1, 5):
        step(run, number)
        assert upload.sync()
    put(run / "hf_format" / "samples_8", **{"config.json": "{}"})
    assert upload.sync()
    assert sum("full_state/step_" in name for name in bucket) == 4, "two states of two files"
    assert bucket["other/cat.png"] == b"cat"
    new = tmp_path / "new"
    new.mkdir()
    storage = Storage("s3://bucket/runs/first")
    assert "up to step 4" in str(storage.check())
    storage.prepare(new, resuming=False)
    assert content(new) == content(run)


@pytest.mark.slow
def test_a_token_store_is_fetched_from_a_bucket(bucket, tmp_path):
    """Its files come by ranges, once for all openings of the machine; a bit that was flipped in the bucket is refused."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"input_ids": [1, {n}], "labels": [-100, {n}], "len": 2}}\n' for n in range(2, 50)))
    store = forge_data.TokenStore.from_jsonl(rows, tmp_path / "store")
    for path in store.path.rglob("*"):
        if path.is_file():
            bucket[f"stores/{path.relative_to(store.path).as_posix()}"] = path.read_bytes()
    found = forge_data.TokenStore.open("s3://bucket/stores", cache_dir=tmp_path / "cache")
    assert (found.fingerprint, found[7].labels.tolist()) == (store.fingerprint, [-100, 9])
    found.verify()
    # Only the manifest is read again.
    masks = bucket.pop("stores/loss_mask.bin")
    assert forge_data.TokenStore.open("s3://bucket/stores", cache_dir=tmp_path / "cache").path == found.path
    bucket["stores/loss_mask.bin"] = masks[:-1] + bytes([masks[-1] ^ 1])
    with pytest.raises(forge_data.StoreError, match=r"s3://bucket/stores/loss_mask\.bin does not hold what was written"):
        forge_data.TokenStore.open("s3://bucket/stores", cache_dir=tmp_path / "other")
    assert not any(path.is_dir() for path in (tmp_path / "other").iterdir())
