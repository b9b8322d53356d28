"""Check the English of docstrings, comments, strings, names and pages; print each finding with a replacement.

    python scripts/project/check_prose.py                       # also: make lint; exit 1 if something was found
    python scripts/project/check_prose.py trainer/run docs      # only these

A summary names its subject, words are common ones, spelling is American, and every reader can open what is cited.
Not covered: grammar, words that are cut at the end of a comment line, and rules that need judgment.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import re
import subprocess
import sys
import token
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

EXCEPTIONS = (
    ("", "retokenise", "a value of `--break` and of the JSON format of a diagnosis"),
    ("", "retokenisation", "the same"),
    ("scripts/project/check_prose.py", "", "lists the words that it refuses"),
    ("tests/unit/project/test_prose.py", "", "shows texts that are refused"),
    ("lab/diagnosis/cases.py", "colours", "a prompt, with which the numbers of docs/diagnosis.md were measured"),
    ("lab/diagnosis/cases.py", "nobody", "the same"),
)
"""(path prefix, words, reason): in these files these words are allowed; no words: the file is not checked."""

SUMMARIES = {
    "What": "name the subject: a noun phrase for a module, class or field, a verb phrase for a function",
    "Whether": '"True if ...", or a verb phrase',
    "Of": "a complete phrase that names the subject",
    "That": "a complete phrase that names the subject",
}
"""First words that a docstring or a comment does not have, and what to write instead."""

WORDS = {
    r"somebody(?: else)?": '"a person", "a user", or who it is',
    r"nobody": '"no one", or who does not do it',
    r"anew": '"again", "from scratch"',
    r"so\s+many": "the number, or the setting that holds it",
    r"(?<!\bthere )is\s+no\s+(?!longer\b|more\b|less\b|better\b|worse\b)\w+": '"is not a ...", "is missing"',
    r"for\s+the\s+eyes\s+of": '"only ... sees it"',
    r"not\s+to\s+be\s+had": '"is not available", "cannot be used"',
    r"wish(?:es)?\s+to": '"want to", or the imperative',
}
"""Words that are refused everywhere, and what to write instead."""

PARTICIPLES = frozenset(
    [
        "asked",
        "called",
        "chosen",
        "drawn",
        "found",
        "given",
        "kept",
        "known",
        "lacks",
        "made",
        "named",
        "said",
        "seen",
        "sent",
        "shown",
        "taken",
        "wanted",
        "written",
    ]
)
"""Words that are no name of a function, a class or a variable."""

CITATIONS = {
    r"seed\s+000": '"KL Divergence Analysis" (jphme, gist, 2026)',
    r"seed\s+001": 'ms-swift docs, "Training-Inference-Mismatch"',
    r"seed\s+002": 'NeMo Gym docs, "On-Policy Corrections"',
    r"seed\s+003": '"The N Implementation Details of RLHF with PPO" (Hugging Face blog, 2023)',
    r"seed\s+004": '"Reinforcement Learning Loss Normalization" (note)',
    r"\((?:[PGR]\d{1,2}|A[12])(?:, ?(?:[PGR]\d{1,2}|A[12]))*\)": "the title of the document",
    r"tokens\.md\s+rules?\s+\d": "a page of this repository",
    r"\.\./shared": "a path inside this repository",
    r"(?<![\w.$}])/(?:work|farm|tmp/env|opt/pypi|opt/wheels|tmp/bash_jobs|root)(?:/|\b)": "a path that readers have",
}
"""References that a reader of this repository cannot open, and what to write instead."""

_VERBS = (
    "author|categor|central|custom|discret|emphas|factor|final|general|initial|local|material|maxim|minim|normal|optim|"
    "organ|parallel|penal|priorit|quant|random|recogn|regular|serial|special|stabil|standard|summar|synchron|token|util|"
    "vector|visual"
)
SPELLINGS = {
    rf"({_VERBS})is(?=e|a|ing)": r"\1iz",
    r"(behavi|col|fav|flav|harb|hon|hum|lab|neighb)our": r"\1or",
    r"(channel|label|level|model|signal|total|travel)l(?=ed\b|ing\b)": r"\1",
    r"\bcentre(?=s?\b)": "center",
    r"\bcentred": "centered",
    r"\banalys(?=e[dr]?\b|ing\b)": "analyz",
    r"\bartefact": "artifact",
    r"\bcatalogue": "catalog",
    r"\bdefence": "defense",
    r"\bfulfil(?=s?\b)": "fulfill",
    r"\bgrey": "gray",
    r"\bjudgement": "judgment",
    r"\blearnt\b": "learned",
    r"\blicence": "license",
    r"\bprogramme(?=s?\b)": "program",
    r"\bwhilst\b": "while",
}
"""British spellings and the American ones."""

PHRASES = [
    *((re.compile(rf"\b(?:{words})\b", re.IGNORECASE), instead) for words, instead in WORDS.items()),
    *((re.compile(words), instead) for words, instead in CITATIONS.items()),
]
WORD = re.compile(r"\w+")
OPENING = re.compile(rf"\W*({'|'.join(SUMMARIES)})\b")

Finding = tuple[int, str, str]
"""Line, the words that were found, and what to write instead."""


def check_text(text: str, line: int = 1) -> Iterator[Finding]:
    """Yield what is refused anywhere in a text that begins in this line."""

    def line_of(match: re.Match[str]) -> int:
        return line + text.count("\n", 0, match.start())

    for pattern, instead in PHRASES:
        for match in pattern.finditer(text):
            yield line_of(match), " ".join(match[0].split()), instead
    for match in WORD.finditer(text):
        if (spelling := american(match[0])) != match[0]:
            yield line_of(match), match[0], spelling


@functools.cache
def american(word: str) -> str:
    """Return a word in American spelling, in capitals if it was."""
    spelling = word
    for pattern, replacement in SPELLINGS.items():
        spelling = re.sub(pattern, replacement, spelling, flags=re.IGNORECASE)
    return spelling.upper() if word.isupper() else spelling


def check_summary(text: str, line: int) -> Iterator[Finding]:
    """Yield the first word of a docstring or comment, if it is refused there."""
    if match := OPENING.match(text):
        yield line, f"{match[1]} ...", SUMMARIES[match[1]]


def check_python(source: str) -> Iterator[Finding]:
    """Yield the findings in docstrings, comments, strings and names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from check_summary(node.value.value, node.lineno)
    for token_info in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, line = token.tok_name[token_info.type], token_info.start[0]
        if kind == "COMMENT":
            yield from check_summary(token_info.string, line)
        if kind in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            yield from check_text(token_info.string, line)
        elif kind == "NAME":
            yield from ((line, token_info.string, instead) for instead in check_name(token_info.string))


@functools.cache
def check_name(name: str) -> list[str]:
    """Return what to write instead of words in a name."""
    return [instead for _, _, instead in check_text(name.replace("_", " "))]


def check_definitions(source: str) -> Iterator[Finding]:
    """Yield the functions, classes and local variables that are named by a participle alone."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and node.name.strip("_").lower() in PARTICIPLES:
            yield node.lineno, node.name, "a verb for a function, a noun for a class"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (
                (name.lineno, name.id, "a noun that says what the value is")
                for name in ast.walk(node)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.id in PARTICIPLES
            )


def check_file(path: str) -> list[Finding]:
    """Return the findings in a file by line, without those of `EXCEPTIONS`."""
    allowed_words = [words for prefix, words, _ in EXCEPTIONS if path.startswith(prefix)]
    if "" in allowed_words:
        return []
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        findings = list(check_python(text))
        if not path.startswith("tests/"):
            findings += check_definitions(text)
    else:
        findings = list(check_text(text))
        if not path.endswith((".md", ".jinja")):  # where # begins a comment
            for number, line in enumerate(text.splitlines(), start=1):
                findings += check_summary(line.partition("#")[2], number)
    return sorted(finding for finding in set(findings) if finding[1] not in allowed_words)


def chosen_files(paths: list[str]) -> list[str]:
    """Return the files with prose below these paths, or without paths all."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return [
        path
        for path in sorted(set(files))
        if (
            Path(path).suffix in (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".sbatch", ".jinja")
            or Path(path).name in ("Dockerfile", "Makefile", "run")
        )
        and (ROOT / path).is_file()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the English of code and pages.")
    parser.add_argument("paths", nargs="*", help="files and folders; default: all")
    files = chosen_files(parser.parse_args().paths)
    findings = [(path, *finding) for path in files for finding in check_file(path)]
    for path, line, words, instead in findings:
        print(f'{path}:{line}: "{words}"; write instead: {instead}')
    print(f"{len(files)} files, {len(findings)} findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
