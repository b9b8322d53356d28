"""While an engine runs and takes weights, nothing that it or the sync opened can be reached from elsewhere."""

import pytest

from tests.fixtures.sockets import is_loopback, listening
from tests.integration.conftest import Served

pytestmark = pytest.mark.engine


def test_engine_and_weight_sync_listen_on_loopback_only(served: Served):
    served.push()
    served.generate((5, 6, 7), max_tokens=2)
    opened = listening()
    assert [entry for entry in opened if not is_loopback(entry[0])] == []
