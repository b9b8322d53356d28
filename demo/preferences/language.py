"""A small generated language with judges of its texts: sentiment and descriptiveness.

Sentences have five to about sixteen words. A fixed-length continuation of 24 tokens has a full stop at index 16 or
later about two times in three, so that the rejection of the historical recipe has an effect.

Not covered: meaning. A judge counts words, which makes the true score known and reward hacking visible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, UNKNOWN, STOP = "<|endoftext|>", "<|unknown|>", "."


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words("he she they anna omar the_child the_old_man her_sister")
NOUNS = _words("door river garden house letter road table window horse boat lamp coat stone field song fire")
VERBS = _words("opened found watched left crossed carried followed remembered painted touched heard lost")
PLACES = _words("near behind beyond under beside above")
ADJECTIVES = _words("tall dark silver quiet narrow wooden golden ancient pale heavy crooked velvet")
GLAD = _words("happy delighted hopeful proud calm grateful joyful loved")
SAD = _words("sad afraid angry lonely bitter tired ashamed broken")
GLUE = ["the", "a", "was", "and", ",", STOP]

VOCABULARY = [END_OF_TEXT, UNKNOWN, *GLUE, *NAMES, *NOUNS, *VERBS, *PLACES, *ADJECTIVES, *GLAD, *SAD]

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- message.content }}"
    "{%- if message.role == 'assistant' %}{{- '" + END_OF_TEXT + "' }}{%- endif %}{%- endfor %}"
)
"""The text without markup: a prompt is continued, not answered."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word; words are separated by spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, unk_token=UNKNOWN
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_text(rng: random.Random, num_words: int) -> list[str]:
    """Return at least `num_words` words of sentences, of which the first may lack its beginning, as in an excerpt."""
    words = sentence(rng)
    words = words[rng.randrange(len(words)) :]
    while len(words) < num_words:
        words += sentence(rng)
    return words


def sentence(rng: random.Random) -> list[str]:
    words = clause(rng)
    while rng.random() < 0.3:
        words += [",", "and", *clause(rng)]
    return [*words, STOP]


def clause(rng: random.Random) -> list[str]:
    """Return a clause about a feeling or an action."""
    who = rng.choice(NAMES)
    if rng.random() < 0.35:
        return [who, "was", rng.choice(GLAD if rng.random() < 0.5 else SAD), *_place(rng)]
    return [who, rng.choice(VERBS), *_thing(rng), *_place(rng)]


def _thing(rng: random.Random) -> list[str]:
    adjectives = [rng.choice(ADJECTIVES)] if rng.random() < 0.3 else []
    return [rng.choice(["the", "a"]), *adjectives, rng.choice(NOUNS)]


def _place(rng: random.Random) -> list[str]:
    return [rng.choice(PLACES), *_thing(rng)] if rng.random() < 0.4 else []


def sentiment(words: Sequence[str]) -> float:
    """Count glad words minus sad ones."""
    return float(sum(word in GLAD for word in words) - sum(word in SAD for word in words))


def descriptiveness(words: Sequence[str]) -> float:
    """Count adjectives."""
    return float(sum(word in ADJECTIVES for word in words))


JUDGES: Mapping[str, Callable[[Sequence[str]], float]] = {"sentiment": sentiment, "descriptiveness": descriptiveness}
"""The true score of each task, without the noise of raters."""
