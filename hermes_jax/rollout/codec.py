"""Text to token ids and back, with control over what may become a special id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

ANCHOR = "\ufdef"
"""A Unicode noncharacter that stands for "not at the start of the text" while a later piece is encoded."""

_PLACEHOLDER = re.compile(r"image|img|video|audio|vision", re.IGNORECASE)


@dataclass(frozen=True)
class AddedToken:
    """A token that the tokenizer finds in text before anything else.

    Args:
        id: its id.
        special: the tokenizer calls it special (`<|im_end|>`), as opposed to merely added (`<think>` in Qwen3).
    """

    id: int
    special: bool


@runtime_checkable
class TextCodec(Protocol):
    """What chat rendering needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def added(self) -> Mapping[str, AddedToken]:
        """Added tokens by their text."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """bos_token, eos_token, pad_token, ... as chat templates see them."""
        ...

    def encode(self, text: str, *, after: int | None = None) -> list[int]:
        """Ids of `text` with added tokens recognised and nothing put around it.

        `after`: the id that stands before it in the sequence; None = the text starts the sequence.
        """
        ...

    def encode_plain(self, text: str, *, first: bool = False) -> list[int]:
        """Ids of `text` with no added token recognised, whatever it says. `first`: it starts the sequence."""
        ...

    def decode(self, ids: Sequence[int], *, after: int | None = None) -> str:
        """Text of ids, specials included, bytes that are no UTF-8 replaced by U+FFFD; `after` as in `encode`."""
        ...


class HFCodec:
    """A `transformers` fast tokenizer as a `TextCodec`. Works on copies: the tokenizer itself is left as it is.

    Raises:
        TypeError: the tokenizer has no `tokenizers` backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TypeError(
                f"{type(tokenizer).__name__} has no `tokenizers` backend; a fast tokenizer (tokenizer.json) is needed"
            )
        spec = json.loads(backend.to_str()) | {"truncation": None, "padding": None, "post_processor": None}
        self._full = Tokenizer.from_str(json.dumps(spec))
        self._plain = Tokenizer.from_str(json.dumps(spec | {"added_tokens": []}))
        self.vocab_size = 1 + max(self._full.get_vocab(with_added_tokens=True).values())
        self.added = {t.content: AddedToken(i, t.special) for i, t in self._full.get_added_tokens_decoder().items()}
        self.special_tokens = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
        self._texts = {token.id: text for text, token in self.added.items()}
        for copy in (self._full, self._plain):
            copy.add_special_tokens([ANCHOR])

    def encode(self, text: str, *, after: int | None = None) -> list[int]:
        """See `TextCodec.encode`. After an added token that token itself stands before: some swallow white space."""
        if after is None:
            return list(self._full.encode(text, add_special_tokens=False).ids)
        if (before := self._texts.get(after)) is not None:
            ids = self._full.encode(before + text, add_special_tokens=False).ids
            if ids[:1] == [after]:
                return list(ids[1:])
        return list(self._full.encode(ANCHOR + text, add_special_tokens=False).ids[1:])

    def encode_plain(self, text: str, *, first: bool = False) -> list[int]:
        """See `TextCodec.encode_plain`.

        Raises:
            ValueError: the tokenizer makes a special id even of single characters.
        """
        ids = self._encode_plain(text, first)
        if not any(i in self._texts for i in ids):
            return ids
        # The model behind the tokenizer knows the text of an added token as one piece (Unigram, ignore_merges).
        ids = [i for place, char in enumerate(text) for i in self._encode_plain(char, first and place == 0)]
        if bad := next((i for i in ids if i in self._texts), None):
            raise ValueError(f"the tokenizer makes the added token {self._texts[bad]!r} out of plain text")
        return ids

    def _encode_plain(self, text: str, first: bool) -> list[int]:
        if first:
            return list(self._plain.encode(text, add_special_tokens=False).ids)
        return list(self._plain.encode(ANCHOR + text, add_special_tokens=False).ids[1:])

    def decode(self, ids: Sequence[int], *, after: int | None = None) -> str:
        """See `TextCodec.decode`. Decoders that drop a leading space see the id before, so they keep it."""
        if after is None:
            return str(self._full.decode(list(ids), skip_special_tokens=False))
        before = self._full.decode([after], skip_special_tokens=False)
        whole = self._full.decode([after, *ids], skip_special_tokens=False)
        return str(whole[len(before) :] if whole.startswith(before) else self.decode(ids))


def as_codec(tokenizer: Any) -> TextCodec:
    """The codec of a tokenizer: itself if it is one, else a `transformers` fast tokenizer wrapped."""
    if isinstance(tokenizer, TextCodec):
        return tokenizer
    return HFCodec(tokenizer)


def placeholder_ids(codec: TextCodec) -> frozenset[int]:
    """Ids that stand for an image, a video or sound in a prompt. A text policy must never sample them."""
    return frozenset(t.id for text, t in codec.added.items() if t.special and _PLACEHOLDER.search(text))
