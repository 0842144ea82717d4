"""Unpaired preferences: both wanted and unwanted answers, or a refusal."""

from typing import TYPE_CHECKING

from forge_data._errors import DataError

if TYPE_CHECKING:
    from forge_data.store._token_store import TokenStore


def check_classes(store: "TokenStore") -> None:
    """Make sure that a store of unpaired preferences, or a view of one, holds wanted answers and unwanted ones.

    KTO (Ethayarajh and others 2024, equation 8) learns from the difference; of one class alone it pushes every answer one way.

    Raises:
        DataError: all labels are the same.
        StoreError: the store holds no unpaired preferences.
    """
    wanted = store.desirable
    if wanted.any() and not wanted.all():
        return
    if not len(wanted):
        raise DataError(f"{store.path}: this view holds no answer; KTO needs wanted and unwanted ones")
    label = "true" if wanted[0] else "false"
    remedy = (
        "add rows with label false, or learn these with sft"
        if wanted[0]
        else "add rows with label true: nothing here is to be learned"
    )
    raise DataError(
        f"{store.source(0)} and every other answer that is trained on ({len(wanted):,}) has the label {label}, and KTO learns from "
        f"the difference between wanted and unwanted answers; {remedy}"
    )
