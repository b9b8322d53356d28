r"""Numbers in answers, read exactly, as fractions, or not at all.

A number has digits, an optional sign, thousands separators (`1,234`, `1{,}234`, `1\,234`, `1 234`), decimals and an
exponent (`1.5e3`, `1.5 \times 10^{3}`); or it is a fraction (`3/5`, `\frac{3}{5}`, `½`) or a mixed number (`1\frac12`).
Before it there may be a name or a computation (`x =`, `3 + 4 =`), an arrow or a currency, after it a unit: `$5`, `5\%`,
`5^\circ` and `5 kg` are 5; `5 million` is 5000000. Digits and minus signs may be of any script.

Not numbers: other expressions (`10-3`, `2^{10}`, `\sqrt{16}`, `2\pi`), inequalities, ranges, ratios, lists, dates and
times, also in words (`5 or 6`, `5 to 6`, `not 5`). Not covered: decimal commas, periods of decimals, numbers in words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_CHARS = 400
"""Length of the longest number that is read."""
_CLOSE, _NOISE = Fraction(1, 10**6), Fraction(1, 10**12)
_WORD = r"[^\W\d_]"
_NTH = r"(?:st|nd|rd|th)"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)(?:[a-z]*ber|ust)?\.?"
)
_DIGITS = r"(?:[1-9]\d{0,2}(?:(?:,\d{3})++|(?:,\d{2})+,\d{3})(?!\d)|\d++)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d{{1,4}}(?!\d))?"
_MIXED = r"(?P<whole>\d++)[ _](?P<part>\d++/\d++)"
_NUMBER = re.compile(rf"(?P<sign>[-+]?) ?(?:{_MIXED}|(?P<top>{_DECIMAL})(?: ?/ ?(?P<bottom>-?{_DECIMAL}))?)")
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*")
_TEXT = r"\\(?:text|math|mbox|operatorname|emph|underline)(?:bf|it|rm|sf|tt)? ?\{([^{}]*)\}"
_SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Characters: digits and signs of all scripts as those of ASCII, but for the minus sign, which is never a dash.
        ("[⁰¹²³⁴-⁹⁺⁻]+", lambda match: "^" + _compatible(match).replace("−", "-")),
        ("[¼-¾⅐-⅞]", lambda match: " " + _compatible(match).replace("⁄", "/")),
        (r"(?![0-9])\d", lambda match: str(unicodedata.decimal(match[0]))),
        ("[！-～]", lambda match: _compatible(match)),
        ("[‐‑‒–﹣]", "-"),
        ("[⁄∕]", "/"),
        ("٫", "."),
        ("[<>!]=", lambda match: {"<": "≤", ">": "≥", "!": "≠"}[match[0][0]]),
        # LaTeX and markup. `<<3+4=7>>` is a computation of GSM8K.
        (
            r"\\!|[\u200b-\u200f\u202a-\u202c\u2060\u2066-\u2069\ufeff]|<<[^<>]*>>|\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])",
            "",
        ),
        (r"</?[A-Za-z][^<>]*>|\\(?:begin|end)\{[^{}]*\}|\\[,;: ()\[\]\\]|\\q?quad|[~&—]", " "),
        (r"\{,\}|٬", ","),
        (r"\\([%#])|\^ ?\{? ?(?:\\circ|°) ?\}?|\\degree", lambda match: match[1] or "°"),
        (r"\\times(?![a-z])", "×"),
        (r"\\cdot(?![a-z])", "·"),
        (r"\\approx(?![a-z])", "≈"),
        (r"(?:\b(?:US|AU|CA|HK|NZ|SG))?\\?\$|[€£¥₹₩]|\b(?:USD|EUR|GBP|INR|CNY|Rs\.?) ?(?=[-+]?[\d.])", ""),
        (r"([\u3040-\u9fff\uac00-\ud7a3]+)", r" \1 "),  # scripts without spaces
        (r"[^\S\n]+", " "),
        *((_TEXT, r" \1 "),) * 3,  # nested
        (r"\\[dtc]?frac ?(?:\{([^{}]*)\}|(\d)) ?(?:\{([^{}]*)\}|(\d))", lambda match: _slashed(match)),
        (r"\}\{", "};{"),
        (r"(?<!\\)[{}]", ""),
        # Forms of numbers.
        (r"(?<=[\d.]) ?[×·*x] ?10 ?\^ ?\(?([-+]?\d{1,4})(?!\d)\)?", r"e\1"),
        (r"(?<![\d^.])10\^\(?([-+]?\d{1,4})(?!\d)\)?", r"1e\1"),
        (r"(?<![\d.,])(?<!\d )[1-9]\d{0,2}(?: \d{3})++(?!\d)", lambda match: match[0].replace(" ", "")),
        (r"(?<![\d.,/])(\d++)(?: and)? (\d++/\d)", r"\1_\2"),
        (r"(?<![\d.,/])(\d++) and a half\b", r"\1_1/2"),
        (r"\b(?:[Nn]egative|[Mm]inus) (?=\d)|− ?(?=[\d.])", "-"),
        (r"(^|[=≈:→⇒]|\b(?:is|are|be|equals)) ?- ?(?=[\d.])", r"\1 -"),
        (rf"\b{_MONTH} \d{{1,2}}{_NTH}?(?:,? \d{{4}})?\b|\b\d{{1,2}}{_NTH}? (?:of )?{_MONTH}(?:,? \d{{4}})?\b", "0:0"),
        (rf"\b{_MONTH},? \d{{4}}\b|\b\d{{1,2}}(?::\d\d){{0,2}} ?[AaPp]\.?[Mm]\b\.?", "0:0"),
        # An expression is one word: operators touch their operands, numbers or variables.
        (
            r"((?<=[\d)%])|(?<=\b[b-zB-HJ-Z])) ?([-+*/^×·÷=≈<>≤≥±x]|(?<= ):(?= )) ?(?=[-+]?[\d(.\\]|[b-zB-HJ-Z]\b)",
            r"\2",
        ),
    )
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNIT = re.compile(
    "kg|mg|[ckmn]m|ft|yd|mi|lbs?|oz|[dm]l|hrs?|mins?|secs?|ms|[mk]ph|rpm|[kmg]?hz|[kmgt]b|k?wh?|ma|k?v|ev|k?pa|mol|rad|deg|"
    "gal|qt|pt|sq|cu|usd|eur|gbp|rs|pcs|pts|yrs?|wk|of|in|is|on|at|an|by|as",
    re.IGNORECASE,
)
"""Units, and words behind a number, with less than three letters or so that they may touch it: `5kg`, not `5xy`."""
_LETTERS, _TOUCHING_LETTERS = frozenset("mgshLlWVNJKCFAad"), frozenset("gshLl")  # `5m` may be millions
_NOT_UNIT = re.compile(
    r"or|plus|minus|p[im]|sqrt|squared|cubed|factorial|choose|mod|half|halves|(?:thi|fou|fif|six|seven|eigh|nin|ten|"
    r"hundred|thousand)(?:rd|r?th)s?|[十百千万亿].*|[+×·÷^±!]"
)
"""Words and signs behind a number that make it another one."""
_FUNCTION = re.compile(r"sqrt|log|ln|exp|sin|cos|tan|not|[+×·÷±<>≤≥≠]")
_JOINED = ("or", "to", "and")
"""Words between the numbers of a range or list."""
_ARROW = re.compile(r"(?:[=-]+>|[→⇒⟹⟶➔➜➡∴•]|\\(?:to|(?:long)?[rR]ightarrow|implies|therefore)(?![a-zA-Z]))\s*")
_PROSE = re.compile(rf"[#\n]|(?<![\\\w]){_WORD}{{2}}")
"""The difference of a text and an expression such as `10 - 3`: a line break or a word."""
_NAME = re.compile(rf"{_WORD}{{2}}[^()^=]*|{_WORD}\w*|\d+{_NTH}")
"""Words with digits that are not numbers: H2O, x1, COVID-19, 5th."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of a text."""

    value: Fraction
    decimal: Fraction = Fraction(0)
    """Value of 1 in the last of its decimals; 0 for whole numbers and fractions, which are exact."""

    def equals(self, other: Number, *, rel_tol: float | None = None, abs_tol: float | None = None) -> bool:
        """Return True if both are the same number.

        With a tolerance: if they differ by at most `rel_tol` of the larger one, or by `abs_tol`. Without: exactly, but
        one with decimals may be the other one rounded: they differ by at most 1e-6 of the larger one, and by half of 1
        in the last decimal of that with fewer decimals (or by 1e-12 of the larger one, as binary fractions do).
        """
        apart, larger = abs(self.value - other.value), max(abs(self.value), abs(other.value))
        if rel_tol is not None or abs_tol is not None:
            return apart <= max(Fraction(rel_tol or 0) * larger, Fraction(abs_tol or 0))
        half = max(self.decimal, other.decimal) / 2
        return apart <= (min(_CLOSE * larger, max(half, _NOISE * larger)) if half else 0)


def final_number(text: str) -> Number | None:
    r"""Return the last number of an answer; None if it has none, or ends in something else that has digits.

    The whole content of the last `\boxed{}` must be the number. Words with digits (H2O, 5th) do not count.
    """
    box = _last_box(text)
    plain = _plain(text if box is None else box)
    return _whole(plain) or (next(_in_prose(plain), None) if box is None and _PROSE.search(plain) else None)


def only_number(value: Any) -> Number | None:
    r"""Return the number that a reference states; None if it states none, or several.

    A reference is a number, or a text with one number, or with the number in a `\boxed{}` or behind the last `####`.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, int):
        return Number(value=Fraction(value))
    text = str(value).rpartition("####")[2]
    plain = _plain(text)
    is_several = _last_box(text) is None and _whole(plain) is None and len(list(_in_prose(plain))) > 1
    return None if is_several else final_number(text)


def first_number(text: str) -> Number | None:
    r"""Return the number, boxed or not, with which a text begins; None if it begins with something else."""
    box = _BOX.search(text)
    if box is not None and not any(map(str.isalnum, text[: box.start()])):
        return _whole(_plain(_content(text, box.end())))
    plain = _plain(text)
    begin = next((word for word in plain.split() if any(map(str.isalnum, word))), "")
    return next(_in_prose(plain, step=1)) if _has_number(_bare(begin)) else None


def _last_box(text: str) -> str | None:
    """Return the content of the last box, empty for one that is not closed; None without a box."""
    boxes = list(_BOX.finditer(text))
    return _content(text, boxes[-1].end()) if boxes else None


def _content(text: str, start: int) -> str:
    """Return the text between the brace at `start` and its partner; without a brace, up to a dollar or line end."""
    if text[start : start + 1] != "{":
        return re.split(r"[$\n]", text[start:], maxsplit=1)[0]
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()]
    return ""


def _plain(text: str) -> str:
    """Return a text with its digits, signs, spaces and LaTeX in the forms that `_NUMBER` reads."""
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.strip()


def _compatible(match: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", match[0])


def _slashed(match: re.Match[str]) -> str:
    around = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    before, after = (" " if character.isdigit() else "" for character in around)
    return f"{before}{(match[1] or match[2] or '').strip()}/{(match[3] or match[4] or '').strip()}{after}"


def _whole(text: str, *, is_word: bool = False) -> Number | None:
    """Return the number that a plain text consists of, but for a name, a computation or a unit; else None.

    is_word: the text is a word of prose, in which a letter that touches the number is a unit: `5s` is not a product.
    """
    text = text.rstrip(" \n*_`'\"“”‘’.,;:?").lstrip(" \n#*_`'\"“”‘’,;:?")
    text = _ARROW.sub("", text, count=1) if _ARROW.match(text) else text
    equation = re.fullmatch(r"(.*)([=≈:])(.*)", text, re.DOTALL)
    if equation is not None:
        head, text = re.sub(r"\(\w*\)|_\w+", "", equation[1]), equation[3].strip()
        if re.search(r"[<>≤≥≠^]", head) or (re.search(r"\d", head) and (re.search(_WORD, head) or equation[2] == ":")):
            return None
    while text[:1] in ("(", "[") and text[-1:] in (")", "]") and "," not in text:
        text = text[1:-1].strip()
    match = _NUMBER.match(text)
    scale = None if match is None or match.end() > MAX_CHARS else _scale(text[match.end() :], is_word=is_word)
    if match is None or scale is None:
        return None
    sign = -scale if match["sign"] == "-" else scale
    if match["whole"] is not None:
        part = _divide(*match["part"].split("/"))
        return None if part is None or part >= 1 else Number(value=sign * (int(match["whole"]) + part))
    value = _divide(match["top"], match["bottom"] or "1")
    if value is None or match["bottom"] is not None or value.denominator == 1:
        return None if value is None else Number(value=sign * value)
    digits, _, exponent = match["top"].lower().partition("e")
    return Number(
        value=sign * value, decimal=scale * Fraction(10) ** (int(exponent or 0) - len(digits.partition(".")[2]))
    )


def _divide(top: str, bottom: str) -> Fraction | None:
    """Return the quotient of two texts of numbers; None for a divisor of 0."""
    divisor = Fraction(bottom.replace(",", ""))
    return Fraction(top.replace(",", "")) / divisor if divisor else None


def _scale(rest: str, *, is_word: bool) -> Fraction | None:
    """Return the factor that the text behind a number stands for: 1 for a unit; None if it is something else."""
    words = re.findall(f"{_WORD}+", rest)
    signs = re.sub(rf"(?<={_WORD}) ?\^-?[123](?!\d)|{_WORD}", "", rest)
    if not re.fullmatch(r"[ \n%°./'\"()*·¢-]*", signs) or re.match(r"[*·/](?![^\W\d_])", rest):
        return None
    for number, word in enumerate(words):
        touches = number == 0 and rest[:1].isalpha()
        letters = _LETTERS if not touches else _TOUCHING_LETTERS if is_word else ()
        is_unit = word in letters or _UNIT.fullmatch(word) or (len(word) > 2 and not touches) or word[0] > "\u3000"
        if not is_unit or _NOT_UNIT.fullmatch(word.lower()):
            return None
    return Fraction(_SCALES.get(words[0].lower(), 1) if words else 1)


def _bare(word: str) -> str:
    """Return a word of prose without punctuation around it, and without its beginning up to an equals sign."""
    return re.split(rf"[=≈→]|(?<={_WORD}):", word)[-1].strip("()[]|~#!*_`'\"“”‘’,;:?").rstrip(".")


def _has_number(word: str) -> bool:
    return re.search(r"\d", word) is not None and _NAME.fullmatch(word) is None


def _in_prose(text: str, *, step: int = -1) -> Iterator[Number | None]:
    """Yield the numbers of the words with digits; None for one that is something else. step: -1 from the last one."""
    words = ["", *map(_bare, text.split()), ""]
    for place in range(len(words))[::step]:
        if _has_number(words[place]):
            before, after = (words[near].lower().lstrip("\\") for near in (place - 1, place + 1))
            is_part = _FUNCTION.fullmatch(before) or _NOT_UNIT.fullmatch(after)
            word = f"{words[place]} {after}" if after in _SCALES else words[place]
            number = None if is_part else _whole(word, is_word=True)
            conjunctions = _JOINED if step < 0 else _JOINED[:2]  # behind a marker, `7 and 9 more` is 7
            yield None if number is None or _is_joined(words, place, number, conjunctions) else number


def _is_joined(words: Sequence[str], place: int, number: Number, joined: Sequence[str]) -> bool:
    """Return True if one of these words joins the number with another one; `1/2 or 0.5` is one number."""
    for step in (-1, 1):
        if words[place + step].lower() in joined and _has_number(words[place + 2 * step]):
            other = _whole(words[place + 2 * step], is_word=True)
            if other is None or not number.equals(other):
                return True
    return False
