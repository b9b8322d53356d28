"""Declaration of an environment, an attribute of its class: all that a run must know of it before an episode.

    class Chess:
        declaration = Declaration(reads="seed", opens="a chess program", is_deterministic=False)

The sampler, the checks, the question for `--trust-run` and the documentation read it, and no other place knows an
environment by its name. A class in a file without one has the defaults; a package's class must have one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from lockstep.rollout.environments.drivers import Driver, turn_by_turn
from lockstep.rollout.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Traits of an environment."""

    reads: Literal["prompt", "row", "seed"] = "row"
    """prompt: the row's prompt begins the episode. row: columns of its own. seed: column `seed`, for data that is
    made (`data.path=seeds:1000`)."""
    opens: str = ""
    """Programs, packages or servers that its settings name, or walls that they lower, in words. A saved run with such
    an environment is replayed with `--trust-run` only. Empty: nothing."""
    is_deterministic: bool = True
    """True if the answers depend on the turns alone, and on functions of the user."""
    driver: Driver = turn_by_turn
    max_turns: int = 3
    """Turns of an episode with `environment.max_turns=null`."""
    uses_gateway: bool = False
    """True if it reaches the model at the address of the gateway."""
    has_parts: bool = False
    """True if setting `environments` names the environments that play its rows."""
    runs_programs: bool = False
    """True if it runs programs of the model, without isolation if its setting `unsafe` is true."""
    demo_task: str | None = None
    """Task of the demo, `data/demo/<task>`, whose rows it reads."""
    evaluation_rows: Callable[..., Any] | None = None
    """Returns held-out rows that it brings, for `data.heldout_path=environment`; takes the environment's settings."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`: a trait has a value of another type."""
        for trait in fields(self):
            value = getattr(self, trait.name)
            fits, expected = {
                "bool": (isinstance(value, bool), "True or False"),
                "int": (type(value) is int and value > 0, "a whole number above 0"),
                "str": (isinstance(value, str), "a text"),
                "str | None": (value is None or isinstance(value, str), "a text or None"),
                "Driver": (callable(value), "a driver, such as turn_by_turn"),
                "Callable[..., Any] | None": (value is None or callable(value), "a function or None"),
            }.get(str(trait.type), (value in ("prompt", "row", "seed"), "prompt, row or seed"))
            if not fits:
                raise ConfigError(f"found Declaration({trait.name}={value!r}), expected {expected}")

    @property
    def has_prompt(self) -> bool:
        """True if the first prompt of a row is known without playing it."""
        return self.reads == "prompt" and self.driver is turn_by_turn


def declaration_of(environment: object) -> Declaration:
    """Return the declaration of an environment or its class. Raises `ConfigError`: its attribute is something else."""
    declaration = getattr(environment, "declaration", None)
    if declaration is None:
        return Declaration()
    if not isinstance(declaration, Declaration):
        kind = environment if isinstance(environment, type) else type(environment)
        raise ConfigError(
            f"found {kind.__name__}.declaration of type {type(declaration).__name__}, expected declaration = "
            "Declaration(...) (lockstep/rollout/environments/declaration.py)"
        )
    return declaration
