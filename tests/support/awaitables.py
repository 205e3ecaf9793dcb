"""Answers to await: one that comes, or fails, and one that never comes."""

from __future__ import annotations

import asyncio


async def answered(value: object) -> object:
    if isinstance(value, Exception):
        raise value
    return value


async def never() -> None:
    await asyncio.sleep(3600)
