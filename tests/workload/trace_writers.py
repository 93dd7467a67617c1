"""Writes traces as their sources publish them, from requests with arrivals in whole milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from rose.workload.trace import TraceRequest

BEGIN_2023 = datetime(2023, 11, 16, 18, 15, 46, 680590)
BEGIN_2024 = datetime(2024, 5, 10, tzinfo=UTC)


def own(requests: Sequence[TraceRequest]) -> str:
    rows = [
        f"{one.arrival_s:.4f},{one.prompt_tokens},{one.output_tokens},{' '.join(map(str, one.prefix_blocks))},7"
        for one in requests
    ]
    return "\n".join(["arrival_s,prompt_tokens,output_tokens,prefix_blocks_512,client_id", *rows])


def azure_2023(requests: Sequence[TraceRequest]) -> str:
    """100 ns ticks, no zone, carriage returns."""
    rows = [
        f"{(BEGIN_2023 + timedelta(seconds=one.arrival_s)).isoformat(' ', 'microseconds')}0,"
        f"{one.prompt_tokens},{one.output_tokens}"
        for one in requests
    ]
    return "\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""])


def azure_2024(requests: Sequence[TraceRequest]) -> str:
    """A zone, and no fraction where it is 0."""
    rows = [
        f"{(BEGIN_2024 + timedelta(seconds=one.arrival_s)).isoformat(' ')},{one.prompt_tokens},{one.output_tokens}"
        for one in requests
    ]
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])


def burstgpt(requests: Sequence[TraceRequest]) -> str:
    rows = [
        f"{one.arrival_s},ChatGPT,{one.prompt_tokens},{one.output_tokens},"
        f"{one.prompt_tokens + one.output_tokens},Conversation log"
        for one in requests
    ]
    return "\n".join(["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *rows])


def burstgpt_sessions(requests: Sequence[TraceRequest]) -> str:
    rows = [
        f"{one.arrival_s},{at},0.5,GPT-4,{one.prompt_tokens},{one.output_tokens},"
        f"{one.prompt_tokens + one.output_tokens},API log"
        for at, one in enumerate(requests)
    ]
    columns = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    return "\n".join([columns, *rows])


def mooncake(requests: Sequence[TraceRequest]) -> str:
    rows = [
        {
            "timestamp": round(one.arrival_s * 1000),
            "input_length": one.prompt_tokens,
            "output_length": one.output_tokens,
            "hash_ids": list(one.prefix_blocks),
        }
        for one in requests
    ]
    return "\n".join(map(json.dumps, rows)) + "\n"


def bailian(requests: Sequence[TraceRequest]) -> str:
    rows = [
        {
            "chat_id": at,
            "parent_chat_id": at - 1,
            "timestamp": one.arrival_s,
            "input_length": one.prompt_tokens,
            "output_length": one.output_tokens,
            "type": "text",
            "turn": 1,
            "hash_ids": list(one.prefix_blocks),
        }
        for at, one in enumerate(requests)
    ]
    return "\n".join(map(json.dumps, rows)) + "\n"
