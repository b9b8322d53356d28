"""Licenses of the locked packages: each is known, and permissive or explained."""

from __future__ import annotations

import fnmatch
import importlib.metadata

import pytest
from packaging.utils import canonicalize_name

from scripts.project.list_licenses import NOTES, is_permissive, licenses, note
from scripts.project.lock import FOLDER, LOCKS, license_of, locked, versions

LOCKED = versions(package for name in LOCKS for package in locked(FOLDER / name))


def test_the_license_of_every_locked_version_is_recorded() -> None:
    recorded = {package: fact["version"] for package, fact in licenses().items()}
    assert recorded.keys() == LOCKED.keys(), "run: make lock"
    assert {package: version for package, version in recorded.items() if version not in LOCKED[package]} == {}
    assert all(fact["url"].startswith("http") for fact in licenses().values())


def test_a_license_is_permissive_or_has_a_note() -> None:
    unexplained = {name: fact["license"] for name, fact in licenses().items() if not is_permissive(fact["license"])}
    assert {name: license for name, license in unexplained.items() if not note(name)} == {}
    assert [pattern for pattern in NOTES if not fnmatch.filter(unexplained, pattern)] == [], "notes about nothing"


@pytest.mark.parametrize("name", ["GPL-3.0", "MIT AND GPL-3.0", "Other/Proprietary License", "", "LGPL-2.1-only"])
def test_other_licenses_are_not_permissive(name: str) -> None:
    assert not is_permissive(name)


@pytest.mark.parametrize("name", ["MIT", "Apache-2.0 OR BSD-3-Clause", "Academic Free License (AFL) / MIT License"])
def test_permissive_licenses_and_their_combinations_are(name: str) -> None:
    assert is_permissive(name)


def test_installed_packages_declare_the_recorded_licenses() -> None:
    recorded, compared = licenses(), 0
    for distribution in importlib.metadata.distributions():
        fact = recorded.get(canonicalize_name(distribution.metadata["Name"]))
        if fact and fact["version"] == distribution.version:
            compared += 1
            assert license_of(distribution.metadata.json) == fact["license"], distribution.metadata["Name"]
    assert compared > 150


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"license_expression": "MIT", "license": "other", "classifier": []}, "MIT"),
        ({"classifier": ["License :: OSI Approved", "License :: OSI Approved :: BSD License"]}, "BSD License"),
        ({"license": "\n  Apache 2.0\nmore"}, "Apache 2.0"),
        ({}, ""),
    ],
)
def test_the_declared_license_is_read_from_the_most_exact_field(metadata: dict, expected: str) -> None:
    assert license_of(metadata) == expected
