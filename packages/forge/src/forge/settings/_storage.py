"""Settings of the copy of a run directory that is kept elsewhere."""

from __future__ import annotations

import re
import urllib.parse

import attrs


def _address(_: object, field: attrs.Attribute[str | None], value: object) -> None:
    """Raise for what is no URL or path, or holds a password, which config.yaml would show."""
    if value is None:
        return
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise TypeError(f"{field.name} must be a URL such as s3://bucket/run, or a path, not {value!r}")
    if re.match(r"(.*::)?memory:", value):
        raise ValueError(
            f"{field.name} must outlive the process that writes it, and memory:// does not, not {value!r}. Give a URL such as "
            "s3://bucket/run, or a path"
        )
    if re.match(r"[a-z][a-z0-9+.-]+:/(?!/)", value):
        raise ValueError(f"{field.name} is no address, and a strange path: {value!r}. A URL has two slashes after its colon")
    if re.match(r"file://[^/]", value):
        raise ValueError(f"{field.name} must have a whole path after file://, such as file:///shared/run, not {value!r}")
    try:
        address = urllib.parse.urlsplit(value)
        secret = address.password is not None or (address.query if "://" in value else "")
    except ValueError as error:
        raise ValueError(f"{field.name} is no address: {error}") from None
    if secret:
        raise ValueError(
            f"{field.name} holds a password or a query, and config.yaml would show it: give the address alone, and the rest in "
            "the environment variables of its file system (for s3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        )


@attrs.frozen(kw_only=True)
class StorageSettings:
    """Settings of the copy of a run directory that is kept elsewhere."""

    checkpoint_storage: str | None = attrs.field(default=None, validator=_address)
    """URL of a directory of this run's own (s3://, file://, any other of fsspec, or a path) to which each full state and export
    is copied in the background. A run whose ckpt_output_dir is empty resumes from it."""
