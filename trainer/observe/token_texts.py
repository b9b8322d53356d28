"""Texts of single tokens, for people."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """Readable text of single tokens. Ids beyond the tokenizer's vocabulary read as `[id]`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self.control_ids = frozenset(
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or any(not character.isalnum() and not character.isspace() for character in token.content)
        )
        """Special tokens, and added markup such as `<tool_call>`."""

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str:
        text = self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        if text and "\ufffd" not in text:
            return text
        # Part of a multi-byte character, or an unknown id.
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        return piece if isinstance(piece, str) and piece else f"[{token_id}]"
