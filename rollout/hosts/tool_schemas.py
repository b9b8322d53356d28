"""Program of a host that checks tools and arguments against the JSON schemas of tool servers.

A schema can make its check last for hours (a pattern that backtracks, definitions that double), and Python cannot be
interrupted in it, so it runs where it can be killed. Nothing is fetched. The checks of Python functions, whose schemas
are known to be harmless, call `arguments_problem` in their own process.
"""

from __future__ import annotations

import functools
import graphlib
import json
import resource
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

MEMORY_BYTES = 2**30
MAX_CHARS = 1000
REFERENCES = ("$ref", "$dynamicRef")
IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
"""Keywords whose schemas are for the same value as the schema that has them."""


def schema_problem(text: str) -> str | None:
    """Return what is wrong with a schema, or None: a fault by the standard, a reference that leads nowhere, or a circle
    of references for the same value."""
    try:
        return _schema_problem(text)
    except Exception as error:  # of an identifier that is not an address, of depth
        return f"its schema cannot be read ({type(error).__name__})"


def _schema_problem(text: str) -> str | None:
    root = json.loads(text)
    edges: dict[int, list[int]] = {}
    waiting = [(root, Registry().resolver_with_root(DRAFT202012.create_resource(root)), True)]
    while waiting:
        schema, resolver, is_target = waiting.pop()
        if id(schema) in edges:
            continue
        edges[id(schema)] = []
        try:
            if is_target:  # others were checked with the schema that has them
                Draft202012Validator.check_schema(schema)
            if isinstance(schema, bool):
                continue
            inner = resolver.in_subresource(DRAFT202012.create_resource(schema))
            for reference in (schema[name] for name in REFERENCES if name in schema):
                target = inner.lookup(reference)
                edges[id(schema)].append(id(target.contents))
                waiting.append((target.contents, target.resolver, True))
        except SchemaError as error:
            return f"its arguments are not a JSON schema: {error.message:.200}"
        except Unresolvable as error:
            return f"its schema refers to {error.ref!r:.200}, which is not part of it; nothing is fetched"
        here = {name: schema[name] for name in IN_PLACE if name in schema}
        edges[id(schema)] += [id(one) for one in DRAFT202012.subresources_of(here)]
        waiting += [(one, inner, False) for one in DRAFT202012.subresources_of(schema)]
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError:
        return "its schema refers to itself for the same value, so that no check would end"
    return None


def arguments_problem(text: str, arguments: Any) -> str | None:
    """Return what is wrong with arguments by a schema, or None. Never raises."""
    try:
        problem = best_match(_validator(text).iter_errors(arguments))
        if problem is None:
            return None
        where = f" ({problem.json_path.removeprefix('$.')})" if problem.path else ""
        return f"{where}: {problem.message}"[:MAX_CHARS]
    except Exception as error:  # a number beyond floats, depth, a faulty keyword
        return f": they cannot be checked ({type(error).__name__})"


@functools.lru_cache(maxsize=512)
def _validator(text: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(text), registry=Registry())


def answer(do: str, *, schema: str = "", arguments: Any = None) -> str | None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    if do == "ready":
        return None
    return schema_problem(schema) if do == "schema" else arguments_problem(schema, arguments)
