"""What the embedded engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineMetrics:
    """Counters since the engine was built.

    Args:
        tokens_generated: sampled tokens.
        prefill_tokens, prefill_tokens_padded: prompt ids computed; the same with padding.
        prompt_tokens: ids of all prompts; what exceeds `prefill_tokens` was kept or copied.
        copied_slots: cache rows copied for shared prompts.
        decode_calls, decode_steps, prefill_calls: device calls, and steps inside the decode calls.
        compilations: functions compiled; constant after warm-up.
        busy_s: seconds with a request in flight.
        decode_s, prefill_s: seconds the engine waited for such calls (prefill returns before the device is done).
    """

    tokens_generated: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    prefill_tokens_padded: int = 0
    copied_slots: int = 0
    prefill_calls: int = 0
    decode_calls: int = 0
    decode_steps: int = 0
    compilations: int = 0
    busy_s: float = 0.0
    decode_s: float = 0.0
    prefill_s: float = 0.0
