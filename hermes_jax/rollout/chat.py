"""Conversations as token ids.

Sampled ids are never decoded and encoded again: a new prompt is the ids so far plus the ids that the chat template adds
for the new messages. What a message says is encoded as plain text; only the template writes special ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hermes_jax.rollout.codec import TextCodec, as_codec
from hermes_jax.rollout.conventions import find_conventions
from hermes_jax.rollout.template import ChatTemplate, Rendered, TemplateError, select_template

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


class ChatRenderer:
    """Renders conversations with a model's own chat template.

    Args:
        tokenizer: a `transformers` fast tokenizer, or any `TextCodec`.
        chat_template: Jinja text, or several by name; None = the tokenizer's own.
        template_arguments: further variables of the template, such as `enable_thinking`.
        tools: tool schemas in OpenAI form, the same in every prompt.
        stop_ids: ids that end a reply besides those that template and tokenizer name (generation_config.json has some).

    Raises:
        TemplateError: there is no template, or it is no valid Jinja.
        TypeError: the tokenizer has no `tokenizers` backend.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | Mapping[str, str] | None = None,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        tools: Tools = (),
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.codec: TextCodec = as_codec(tokenizer)
        self.tools = list(tools) or None
        chosen = chat_template if chat_template is not None else getattr(tokenizer, "chat_template", None)
        self.template = ChatTemplate(
            select_template(chosen, bool(tools)),
            {text: token.special for text, token in self.codec.added.items()},
            {**self.codec.special_tokens, **(template_arguments or {})},
        )
        self._by_id = {token.id: text for text, token in self.codec.added.items()}
        self._added = re.compile("|".join(map(re.escape, sorted(self.codec.added, key=len, reverse=True))) or "(?!)")
        self.conventions = find_conventions(self.template, list(self.codec.added))
        ends = (self.conventions.end_before_answer, self.conventions.end_before_user)
        texts = (*ends, self.codec.special_tokens.get("eos_token"))
        found = {self.codec.added[text].id for text in texts if text is not None and text in self.codec.added}
        self.stop_ids = tuple(sorted(found | set(stop_ids)))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Rendered:
        """The text of a conversation, by default ready for the model's next turn; raises TemplateError."""
        return self.template.render(messages, self.tools, add_generation_prompt=add_generation_prompt)

    def encode(self, rendered: Rendered, *, after: int | None = None) -> list[int]:
        """Ids of a rendering, of its part after id `after` if given.

        Protected text is encoded as if the tokenizer had no added tokens, together with the text around it up to the
        nearest token that the template wrote. Everything else is encoded in one go, as the tokenizer always does.
        """
        ids: list[int] = []
        last = after
        for plain, text in self._pieces(rendered):
            ids += self.codec.encode_plain(text, first=last is None) if plain else self.codec.encode(text, after=last)
            last = ids[-1] if ids else after
        return ids

    def encode_reply(self, text: str, *, after: int | None = None) -> list[int]:
        """Ids of a scripted reply: like a message of the assistant, so what looks special is spelled out."""
        return self.encode(self.template.protect_reply(text), after=after)

    def end_id(self, *, before_answer: bool) -> int:
        """The id that ends a reply: the template's own marker, else the tokenizer's end token.

        Args:
            before_answer: a tool result follows. Some templates end such a reply in another way.

        Raises:
            TemplateError: there is neither.
        """
        marker = self.conventions.end_before_answer if before_answer else self.conventions.end_before_user
        if marker is not None:
            return self.codec.added[marker].id
        if not self.stop_ids:
            raise TemplateError("replies have no end: the template writes no special token after them, no eos_token")
        return self.stop_ids[0]

    def without_stop(self, ids: Sequence[int]) -> list[int]:
        """The ids without a stop id at their end."""
        return list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def text_of(self, token: int) -> str:
        """Text of an added token; "" for other ids."""
        return self._by_id.get(token, "")

    def _pieces(self, rendered: Rendered) -> list[tuple[bool, str]]:
        """The text in pieces (plain?, text): ordinary ones, and runs between added tokens that hold protected text."""
        text, protected = rendered.text, rendered.protected
        if not protected:
            return [(False, text)]
        pieces: list[tuple[bool, str]] = []
        start = 0
        for token_start, token_end in [*self._written(rendered), (len(text), len(text))]:
            plain = any(a < token_start and b > start for a, b in protected)
            for is_plain, piece in ((plain, text[start:token_start]), (False, text[token_start:token_end])):
                if piece and pieces and pieces[-1][0] == is_plain:
                    pieces[-1] = (is_plain, pieces[-1][1] + piece)
                elif piece:
                    pieces.append((is_plain, piece))
            start = token_end
        return pieces

    def _written(self, rendered: Rendered) -> list[tuple[int, int]]:
        """Where the template itself wrote added tokens: leftmost first, the longest at each place."""
        found, at = [], 0
        protected = iter(rendered.protected)
        span = next(protected, None)
        while match := self._added.search(rendered.text, at):
            start, end = match.span()
            while span and span[1] <= start:
                span = next(protected, None)
            if span and span[0] < end:
                at = start + 1
            else:
                found.append((start, end))
                at = end
        return found
