"""Scripted conversations as episodes."""

from __future__ import annotations

import numpy as np
import pytest

from hermes_jax.rollout.chat import ChatRenderer
from hermes_jax.rollout.scripted import demonstration_episode
from tests.rollout.test_chat import CHATML
from tests.rollout.tokenizers import codec, templates

SCRIPT = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "Ping it."},
    {"role": "assistant", "content": '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'},
    {"role": "tool", "content": "pong <|im_end|>"},
    {"role": "assistant", "content": "Done."},
]


def test_replies_and_their_end_markers_are_the_policys():
    renderer = ChatRenderer(codec("byte_level"), CHATML)
    (trajectory,) = demonstration_episode(renderer, SCRIPT).trajectories
    whole = renderer.encode(renderer.render(SCRIPT, add_generation_prompt=False))
    assert trajectory.tokens.tolist() == whole[: len(trajectory)]
    end = renderer.codec.added["<|im_end|>"].id
    replies = np.split(
        trajectory.tokens[trajectory.mask], np.flatnonzero(trajectory.tokens[trajectory.mask] == end) + 1
    )
    texts = [renderer.codec.decode(reply.tolist()) for reply in replies if len(reply)]
    assert texts == [SCRIPT[2]["content"] + "<|im_end|>", "Done.<|im_end|>"]
    assert not trajectory.logprobs.any()
    assert set(trajectory.temperature.tolist()) == {1.0}
    assert sorted(set(trajectory.turn.tolist())) == [-1, 0, 1]


def test_a_template_that_rewrites_history_gives_several_trajectories():
    renderer = ChatRenderer(codec("byte_level"), templates()["deepseek_r1_distill"])
    script = [m | {"content": "hm</think>" + m["content"]} if m["role"] == "assistant" else m for m in SCRIPT[1:]]
    episode = demonstration_episode(renderer, script)
    assert len(episode.trajectories) == 2
    assert [t.turn.max() for t in episode.trajectories] == [0, 1]


def test_a_script_ends_with_a_reply():
    with pytest.raises(ValueError, match="ends with a message of the assistant"):
        demonstration_episode(ChatRenderer(codec("byte_level"), CHATML), SCRIPT[:2])
