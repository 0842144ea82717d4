"""Tokens and labels → a store on disk, and back: write, publish, open, read by index, split.

May import `findings`, `reading` and `tokenizing`; `TokenStore.from_jsonl` alone imports upwards, from `preparing`.
"""
