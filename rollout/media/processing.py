"""Images of one model: parts of messages to digests, digests to tensors, and placeholders in a prompt to token ids.

    messages   {"type": "image", "image": "a.png"}  ─► {"type": "image", "digest": ...}, the pixels in the store
    rendering  <|vision_start|><|image_pad|><|vision_end|>                    one placeholder per image
    ids        <|vision_start|><|image_pad|> x num_tokens<|vision_end|>       trained, and sent to the engine
    tensors    by digest, once for engine and trainer, from the image processor of the model's directory

Ids inside Lockstep are always the expanded ones. Nothing else expands a prompt or processes an image, so engine and
trainer cannot disagree about either.

The chat template of Gemma 3 writes <start_of_image> alone, and its processor adds two newlines before it, and the soft
tokens, <end_of_image> and two newlines behind it, to the text: the tokenizer then joins newlines that touch (after
`user` and a newline there is one token of three). So this text is added here before a rendering is tokenized, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from lockstep.rollout.errors import ConfigError, ContextFullError, EvidenceError, LockstepError, TemplateError
from lockstep.rollout.media.bounded_cache import BoundedCache, bytes_of
from lockstep.rollout.media.image_files import read_image
from lockstep.rollout.media.prepared_image import PreparedImage
from lockstep.rollout.media.store import ImageStore
from lockstep.rollout.records import ImageSpan, Message, PromptIds, image_parts, is_image_part
from lockstep.rollout.safe_text import error_text

KEPT_BYTES = 2 * 2**30
"""Tensors of images that are kept, the most recently used: of Qwen 24 MB for a megapixel."""


def _merged_patches(config: Any, tensors: Mapping[str, torch.Tensor]) -> int:
    return int(tensors["image_grid_thw"].prod()) // config.vision_config.spatial_merge_size**2


def _soft_tokens(config: Any, tensors: Mapping[str, torch.Tensor]) -> int:
    return len(tensors["pixel_values"]) * config.mm_tokens_per_image


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of one type write an image, and what they compute it from."""

    image_token: str
    """Token that stands for each part of an image in the ids, and for all of it in a rendering."""
    around: tuple[str, str]
    """Tokens before and behind those of an image."""
    num_tokens: Callable[[Any, Mapping[str, torch.Tensor]], int]
    """Number of image tokens of one image, by the model's config and the tensors."""
    tensors: tuple[str, ...]
    reserved: tuple[str, ...]
    """Tokens that only an image or a video may bring into a conversation; a model must not sample them."""
    written: str | None = None
    """Text of the chat template for an image, where it is not the image token."""
    rendered: str = ""
    """Text for the tokenizer in its place, with one image token."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the image processor."""
    type_ids: str = "mm_token_type_ids"
    """Argument of the model in transformers with 1 for each image token, and 0 for others."""
    engine_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that vLLM alone takes, of one image."""


_QWEN = Family(
    image_token="<|image_pad|>",
    around=("<|vision_start|>", "<|vision_end|>"),
    num_tokens=_merged_patches,
    tensors=("pixel_values", "image_grid_thw"),
    reserved=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
)
_GEMMA = Family(
    image_token="<image_soft_token>",
    around=("<start_of_image>", "<end_of_image>"),
    num_tokens=_soft_tokens,
    tensors=("pixel_values",),
    reserved=("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    written="<start_of_image>",
    rendered="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    options={"do_pan_and_scan": False},  # as transformers' processor of the whole model, which has its own default
    type_ids="token_type_ids",
    engine_tensors={"num_patches": torch.ones(1, dtype=torch.int64)},
)
_QWEN_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
FAMILIES = dict.fromkeys(_QWEN_TYPES, _QWEN) | {"gemma3": _GEMMA}
"""By the model type of config.json. Not covered: qwen3_vl_moe, of whose experts vLLM loads transposed weights."""


class ImageProcessing:
    """Images as one model reads them. Threads may share it."""

    def __init__(
        self,
        *,
        family: Family,
        config: Any,
        processor: Any,
        vocabulary: Mapping[str, int],
        store: ImageStore,
        max_per_prompt: int | None = None,
    ) -> None:
        """max_per_prompt: images of a conversation; None: any number.

        Raises `ConfigError` for a tokenizer without the tokens of images, or with another image token than the
        model's."""
        self.family, self.store, self.max_per_prompt = family, store, max_per_prompt
        self._config, self._processor = config, processor
        if lacking := [token for token in family.reserved if token not in vocabulary]:
            raise ConfigError(f"the tokenizer lacks {' and '.join(lacking)}, by which the model reads images")
        self.image_token_id = vocabulary[family.image_token]
        self.reserved_ids = frozenset(vocabulary[token] for token in family.reserved)
        """Ids that a model must not sample."""
        opening, closing = family.around
        self.around_ids = vocabulary[opening], vocabulary[closing]
        self.vocab_size: int = config.get_text_config().vocab_size
        if config.image_token_id != self.image_token_id:
            raise ConfigError(
                f"config.json has the image token {config.image_token_id}, and {family.image_token} of the tokenizer "
                f"is {self.image_token_id}; take both from one checkpoint"
            )
        self.prepared = BoundedCache(self._prepared, size=lambda image: bytes_of(image.tensors), limit=KEPT_BYTES)
        """Return the `PreparedImage` of a digest. Raises `DataError` for an unknown one, `TemplateError` for an image
        that the model does not take."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        store: ImageStore,
        trust_remote_code: bool = False,
        max_per_prompt: int | None = None,
        setting: str = "model.path",
    ) -> ImageProcessing:
        """Load the image processor of a model. Raises `ConfigError` if it has none, or is of an unknown family.

        setting: name of the path's setting, for errors."""
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            family = FAMILIES.get(config.model_type)
            if family is None:
                raise ConfigError(
                    f"{setting}={path}: images are not supported for model type {config.model_type}, only for "
                    f"{', '.join(FAMILIES)}; set {setting} to such a model, or model.images.max_per_prompt=0"
                )
            processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
            vocabulary = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code).get_vocab()
        except LockstepError:
            raise
        except Exception as error:  # of many kinds, for damaged files
            raise ConfigError(
                f"{setting}={path}: no loadable image processor ({error_text(error)}); set {setting} to a directory "
                "with preprocessor_config.json, config.json and a tokenizer"
            ) from error
        return cls(
            family=family,
            config=config,
            processor=processor,
            vocabulary=vocabulary,
            store=store,
            max_per_prompt=max_per_prompt,
        )

    def difference(self, other: ImageProcessing) -> str | None:
        """Return in words what another model reads in another way; None if it can be given the same ids and tensors."""
        if other.family is not self.family:
            return f"its images are {other.family.image_token}, expected {self.family.image_token}"
        theirs, ours = other._processor.to_dict(), self._processor.to_dict()
        for name in sorted(theirs.keys() | ours.keys()):
            # Names of classes differ between versions of transformers that wrote the files.
            if not name.endswith(("_type", "_class")) and theirs.get(name) != ours.get(name):
                return f"its image processor has {name}={theirs.get(name)}, expected {ours.get(name)}"
        blank = Image.new("RGB", (224, 168))
        counts = [one.prepared(one.store.add(blank)).num_tokens for one in (other, self)]
        return None if counts[0] == counts[1] else f"it has {counts[0]} tokens for an image, expected {counts[1]}"

    def save_pretrained(self, directory: Path) -> None:
        """Write the image processor, for `from_pretrained`."""
        self._processor.save_pretrained(directory)

    def with_digests(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the digest of each image in place of the image, which goes into the store.

        Raises `TemplateError`, with message and part, for an image that cannot be read or prepared.
        """
        return [self._with_digest(message, index) for index, message in enumerate(messages)]

    def rendered(self, text: str) -> str:
        """Return a rendering as the tokenizer reads it, with one image token for each image."""
        return text if self.family.written is None else text.replace(self.family.written, self.family.rendered)

    def expanded(self, ids: list[int], messages: Sequence[Message]) -> PromptIds:
        """Return the ids of a rendering with each image token replaced by as many as its image has, and the spans.

        messages: those of the rendering, with digests. Raises `TemplateError` unless it has one image token per image.
        """
        digests = [part["digest"] for message in messages for part in image_parts(message)]
        num_found = ids.count(self.image_token_id)
        if num_found != len(digests):
            raise TemplateError(
                f"the chat template writes {num_found} placeholders for {len(digests)} images; set "
                "model.chat_template=<file.jinja> with one that writes one for each image part of a message"
            )
        if not digests:
            return PromptIds(ids)
        remaining = iter(digests)
        expanded: list[int] = []
        spans: list[ImageSpan] = []
        for token in ids:
            if token != self.image_token_id:
                expanded.append(token)
                continue
            image = self.prepared(next(remaining))
            start = len(expanded)
            expanded += [token] * image.num_tokens
            spans.append(ImageSpan(start=start, end=len(expanded), digest=image.digest))
        return PromptIds(expanded, spans)

    def refuse_too_many(self, prompt: PromptIds) -> None:
        """Raise `ContextFullError` for more images than an engine was started for."""
        if self.max_per_prompt is not None and len(prompt.images) > self.max_per_prompt:
            raise ContextFullError(
                f"the conversation has {len(prompt.images)} images, model.images.max_per_prompt={self.max_per_prompt}; "
                "raise it, or let tools and environments show fewer"
            )

    def refuse_sampled(self, sampled_ids: Sequence[int], source: str) -> None:
        """Raise `EvidenceError` if a model sampled a token of `Family.reserved`.

        It is refused after sampling, not masked before: vLLM's logprobs are those after its masks (`logit_bias`,
        `allowed_token_ids`, `bad_words`), normalized over the other tokens, and the trainer's are over all of them. The
        difference is -log(1 - p) for reserved tokens of probability p: 0.003 to 0.018 with random weights.
        """
        for position, token in enumerate(sampled_ids):
            if token in self.reserved_ids:
                raise EvidenceError(
                    f"{source}: the sampled token {position} (id {token}) is one of {' '.join(self.family.reserved)}, "
                    "which stand for an image that is not there"
                )

    def _with_digest(self, message: Message, index: int) -> Message:
        if not image_parts(message):
            return message
        parts = [
            self._part(part, f"message {index}, part {number}") if is_image_part(part) else part
            for number, part in enumerate(message["content"])
        ]
        return {**message, "content": parts}

    def _part(self, part: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        if isinstance(part.get("digest"), str):
            return part
        try:
            digest = self.store.add(read_image(part, place))
            self.prepared(digest)
        except LockstepError as error:
            raise TemplateError(text if (text := str(error)).startswith(place) else f"{place}: {text}") from error
        except OSError as error:
            raise ConfigError(f"{place}: the image cannot be stored: {error_text(error)}") from error
        return {"type": "image", "digest": digest}

    def _prepared(self, digest: str) -> PreparedImage:
        image = self.store.image(digest)
        try:
            returned = self._processor(images=[image], return_tensors="pt", **self.family.options)
            tensors = {name: returned[name] for name in self.family.tensors}
            num_tokens = self.family.num_tokens(self._config, tensors)
        except Exception as error:  # of many kinds, for extreme sizes
            raise TemplateError(
                f"the model's image processor refuses an image of {image.width} x {image.height} pixels: "
                f"{error_text(error)}"
            ) from error
        return PreparedImage(digest=digest, tensors=tensors, num_tokens=num_tokens)


def refuse_other_images(policy: str, setting: str, path: str, *, trust_remote_code: bool) -> None:
    """Raise `ConfigError` unless the model at `path` takes the images of the model at `policy` as that takes them."""
    load = partial(ImageProcessing.from_pretrained, store=ImageStore(), trust_remote_code=trust_remote_code)
    own, other = load(policy), load(path, setting=setting)
    if (difference := own.difference(other)) is not None:
        raise ConfigError(
            f"{setting}={path} reads images in another way than model.path={policy}: {difference}; set {setting} to a "
            "model that was trained with the policy's image processor"
        )
