"""Pictures of squares, and the tool that looks at them closely."""

from __future__ import annotations

import pytest

from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.demo.squares import SIDE, VIEW, draw_picture
from lockstep.rollout.errors import DataError
from tests.fixtures.turns import use

ROW = {"question": "which square is this?", "square": [124, 16, 80, "red", "rows"]}


async def test_zoom_returns_the_pixels_of_its_own_row_at_full_size():
    environment = make_environment("squares")
    environment.sees_images = True
    await environment.reset(ROW)
    await make_environment("squares").reset(ROW | {"square": [12, 16, 80, "blue", "dots"]})
    step = await environment.step(use("zoom", quarter="top right"))
    (part,) = step.messages[0]["content"]
    left, top = SIDE * 3 // 4 - VIEW // 2, SIDE // 4 - VIEW // 2
    assert part["type"] == "image"
    assert part["image"].tobytes() == draw_picture(ROW["square"]).crop((left, top, left + VIEW, top + VIEW)).tobytes()
    elsewhere = await environment.step(use("zoom", quarter="bottom left"))
    assert elsewhere.messages[0]["content"][0]["image"].getcolors() == [(VIEW * VIEW, (128, 128, 128))]
    assert (await environment.step(use("zoom", quarter="middle"))).outcome["tool_errors"] == 1


@pytest.mark.parametrize("square", [None, [1, 2], [12, 16, 80, "pink", "rows"], [12, 16, 80, "red", "waves"]])
async def test_a_row_without_a_square_is_refused(square):
    with pytest.raises(DataError, match="expected a column square"):
        await make_environment("squares").reset({"question": "?", "square": square})
