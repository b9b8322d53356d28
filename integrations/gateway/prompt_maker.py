"""Tokenization and images of requests, in threads: a long text would stop the event loop, and with it all episodes.

Text that cannot fit in the context is refused before it is rendered. The bound is certain, not tight: every token of
the model's vocabulary stands for a limited number of characters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from transformers import PreTrainedTokenizerFast

from lockstep.integrations.gateway.errors import CONVERSATION, ApiError, not_supported
from lockstep.integrations.gateway.prefix_chain import Prefix, num_characters
from lockstep.integrations.gateway.request import SampleRequest
from lockstep.integrations.gateway.session import CONTEXT_FULL, TOO_MANY_IMAGES, Session
from lockstep.integrations.gateway.splice import Prompt, PromptKind, make_prompt
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.chat.untrusted import UntrustedTextEncoder

if TYPE_CHECKING:
    from lockstep.integrations.gateway.images import RequestImages  # with PIL, for models that see images

NUM_THREADS = 4
_SPACES = str.maketrans("", "", "ĠĊĉčĀ▁")
"""Characters that byte-level and SentencePiece vocabularies write for white space."""

P = ParamSpec("P")
T = TypeVar("T")


class PromptMaker:
    """Tokenizer of conversations and texts. Thread-safe."""

    def __init__(self, chat: Chat, *, max_model_len: int, max_images: int = 0) -> None:
        """max_images: of one prompt, for a chat that sees images."""
        self._chat = chat
        self._max_images = max_images
        self._images: RequestImages | None = None
        if chat.images is not None:
            from lockstep.integrations.gateway.images import RequestImages

            self._images = RequestImages(chat.images)
        self._encoder = UntrustedTextEncoder(chat.tokenizer)
        self._max_model_len = max_model_len
        self._max_characters = max_model_len * longest_token(chat.tokenizer)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gateway-prompts")

    async def store_images(self, session: Session, body: Mapping[str, Any]) -> None:
        """Replace the images of a request by their digests. A model that sees none leaves them to be refused.

        Raises `ApiError` (400) if there are too many, and as `RequestImages.store` does.
        """
        if self._images is None:
            return
        from lockstep.integrations.gateway.images import find_images

        if places := find_images(body):
            self._refuse_beyond_images(session, len(places))
            await self._in_thread(self._images.store, places)

    async def prompt(self, session: Session, request: SampleRequest) -> tuple[Prompt, Prefix]:
        """Return the prompt of a request, and the conversation that its answer continues.

        Raises `ApiError` (400) if it cannot fit in the context or has too many images. Raises as `make_prompt`.
        """
        if request.given is not None:
            ids = await self.text_ids(request.given) if isinstance(request.given, str) else request.given
            if self._chat.images is not None and self._chat.images.image_token_id in ids:
                raise not_supported(
                    "prompt", why="it has tokens that stand for images, which ids do not tell; send messages"
                )
            text = await self._in_thread(self._chat.decode, ids)
            return Prompt(ids=tuple(ids), kind=PromptKind.GIVEN), Prefix.of_text(text)
        conversation = request.conversation
        self._refuse_beyond_context(max(conversation.num_characters, conversation.longest_message))
        prompt = await self._in_thread(make_prompt, self._chat, session, conversation, request.mark)
        self._refuse_beyond_images(session, len(prompt.images))
        return prompt, conversation

    async def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text without control tokens. Raises `ApiError` (400) if it cannot fit in the context."""
        self._refuse_beyond_context(num_characters(text))
        return await self._in_thread(self._text_ids, text)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _text_ids(self, text: str) -> list[int]:
        mask = self._encoder.mask_for(text)
        return self._encoder.encode(mask.hide(text), mask)

    def _refuse_beyond_context(self, length: int) -> None:
        if length > self._max_characters:
            raise ApiError(
                f"This model's maximum context length is {self._max_model_len} tokens, but the text has {length} "
                f"characters; at most {self._max_characters} can fit",
                param=CONVERSATION,
                code=CONTEXT_FULL,
            )

    def _refuse_beyond_images(self, session: Session, count: int) -> None:
        if count > self._max_images:
            raise session.refused(
                f"the conversation has {count} images, and the model reads at most {self._max_images} in one prompt; "
                "leave images out, or raise model.images.max_per_prompt",
                code=TOO_MANY_IMAGES,
            )

    async def _in_thread(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*arguments, **options))


def longest_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the largest number of characters that a token stands for, or more. White space counts a quarter."""
    return max(num_characters(token.translate(_SPACES)) for token in tokenizer.get_vocab())
