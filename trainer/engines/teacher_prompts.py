"""Prompts of a teacher that sees more than the student: a demonstration, feedback, or a solution of another rollout.

    student   [ first prompt            ][ sampled tokens, answers of tools, ... ]
    teacher   [ first prompt + context  ][ the same ids                          ]

Only the first prompt is rendered again, with the context at the end of its last message. Everything after it keeps the
ids of the student's row, so the teacher scores the tokens that the student sampled.

Sources: SDFT (Shenfeld et al. 2026, arXiv 2601.19897, eq. 1: the demonstration as context); SDPO (Hübotter et al. 2026,
arXiv 2601.20802, eq. 1 and table 2: feedback, and a solution of the same group).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Message, PromptIds, Rollout, TrainingRow
from lockstep.trainer.batch.teacher_scores import TeacherRow

SOLUTION = "solution"
"""Name of the answer of a solved rollout of the group; a column of this name comes first."""
FIELD = re.compile(r"\{(\w+)\}")


class TeacherPrompts:
    """Maker of a teacher's rows."""

    def __init__(
        self,
        chat: Chat,
        *,
        template: str,
        solved_reward: float,
        max_tokens: int,
        tools_of: Callable[[Mapping[str, Any]], Tools],
    ) -> None:
        """
        Args:
            template: text with `{name}` of columns, of texts that the environment reports, and of the solution.
            solved_reward: lowest reward of a rollout whose answer is a solution.
            max_tokens: longest sequence that the teacher scores.
            tools_of: returns the tools of the first prompt on a data row.
        """
        self._chat = chat
        self._template = template
        self._solved_reward = solved_reward
        self._max_tokens = max_tokens
        self._tools_of = tools_of
        self._names = dict.fromkeys(FIELD.findall(template))

    def rows(self, rows: Sequence[TrainingRow], rollouts: Sequence[Rollout]) -> tuple[list[TeacherRow], float]:
        """Return what the teacher computes for each row, and the share of its rollouts that have a context.

        A rollout lacks it if a name of the template has no value for it, or one of its rows is too long with it; then
        the teacher sees what the student saw.
        Raises `ConfigError` for a name that no rollout has, and `DataError` for a row that does not begin with a first
        prompt that can be rendered again.
        """
        by_id = {rollout.rollout_id: rollout for rollout in rollouts}
        sources = {row.rollout_id: by_id[row.rollout_id] for row in rows}
        values = {number: self._values(rollout, rollouts) for number, rollout in sources.items()}
        self._refuse_unknown(sources.values())
        prompts = {
            number: self._prompt(sources[number], self._text(texts)) for number, texts in values.items() if texts
        }
        inputs = [self._row(row, sources[row.rollout_id], prompts.get(row.rollout_id)) for row in rows]
        too_long = {row.rollout_id for row, one in zip(rows, inputs, strict=True) if len(one.ids) > self._max_tokens}
        inputs = [
            TeacherRow.plain(row) if row.rollout_id in too_long else one for row, one in zip(rows, inputs, strict=True)
        ]
        return inputs, len(prompts.keys() - too_long) / max(len(sources), 1)

    def _values(self, rollout: Rollout, rollouts: Sequence[Rollout]) -> dict[str, str] | None:
        """Return the values of the template's names; None if one has none."""
        values: dict[str, str] = {}
        for name in self._names:
            value = rollout.example.get(name, rollout.outcome.get(name))
            if value is None and name == SOLUTION:
                value = self._solution(rollout, rollouts)
            if not isinstance(value, str | int | float) or not str(value).strip():
                return None
            values[name] = str(value)
        return values

    def _solution(self, rollout: Rollout, rollouts: Sequence[Rollout]) -> str | None:
        """Return the last answer of the first solved rollout of the group, another one if there is one."""
        solved_rollouts = [
            other
            for other in rollouts
            if other.group_id == rollout.group_id and other.is_trainable and other.reward >= self._solved_reward
        ]
        solved_rollouts.sort(key=lambda other: (other is rollout, other.rollout_id))
        return solved_rollouts[0].answer if solved_rollouts and solved_rollouts[0].sampled_turns else None

    def _refuse_unknown(self, rollouts: Sequence[Rollout] | Any) -> None:
        names = {SOLUTION, *(name for one in rollouts for name in (*one.example, *one.outcome))}
        unknown = [name for name in self._names if name not in names]
        if unknown:
            raise ConfigError(
                f"teacher.context names {{{unknown[0]}}}, which no row of this step has; expected names of "
                f"{', '.join(sorted(names))}"
            )

    def _text(self, values: Mapping[str, str]) -> str:
        return FIELD.sub(lambda found: values[found[1]], self._template)

    def _prompt(self, rollout: Rollout, context: str) -> PromptIds:
        """Return the ids of the first prompt with the context."""
        first = rollout.prompt
        tools = self._tools_of(rollout.example)
        if not first or self._chat.prompt(first, tools) != _first_prompt(rollout):
            raise DataError(
                f"the first prompt of rollout {rollout.rollout_id} is not what its first messages render to, so "
                "teacher.context cannot be put into it; take an environment that begins with messages of the row, "
                "such as environment=single_turn, or set teacher.context=null teacher.source=model"
            )
        return self._chat.prompt([*first[:-1], _with_context(first[-1], context)], tools)

    def _row(self, row: TrainingRow, rollout: Rollout, prompt: PromptIds | None) -> TeacherRow:
        if prompt is None:
            return TeacherRow.plain(row)
        first = _first_prompt(rollout)
        start = len(first)
        its_images = [image for image in row.images if image.start < start]
        if PromptIds(row.ids[:start].tolist(), its_images) != first:
            raise DataError(
                f"a row of rollout {rollout.rollout_id} does not begin with its first prompt: the conversation "
                "branched, and teacher.context has no place in the branch; set environment.history=keep"
            )
        return TeacherRow.after(prompt, row, start=start)


def _first_prompt(rollout: Rollout) -> PromptIds:
    return PromptIds(rollout.calls[0].prompt_ids, rollout.calls[0].images)


def _with_context(message: Message, context: str) -> Message:
    """Return the message with the context at its end: in its last text, because templates may trim each text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}\n\n{context}"}
    if not isinstance(content, list | tuple):
        raise DataError(
            f"the last message before the first turn has content of the type {type(content).__name__}, expected a text "
            "or parts, to which teacher.context can be added"
        )
    *parts, last = content or [None]
    if isinstance(last, Mapping) and isinstance(last.get("text"), str):
        return {**message, "content": [*parts, {**last, "text": f"{last['text']}\n\n{context}"}]}
    return {**message, "content": [*content, {"type": "text", "text": context}]}
