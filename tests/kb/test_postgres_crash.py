"""The process that indexes is killed, or the server is: nothing that was committed is lost, nothing is embedded again, and what comes out
is what an undisturbed build makes. `python -m benchmarks.kb_crash --postgres` does more of it."""

import pytest

from tests.kb import servers
from tests.kb.crashes import Indexer
from tests.kb.postgres_crashes import IMMEDIATE, KILL, DurableServer, ServerHistory, make_scene, when_done, while_writing


@pytest.fixture(scope="module")
def durable():
    server = servers.start(DurableServer)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def scene(tmp_path_factory, durable):
    return make_scene(tmp_path_factory.mktemp("scene"), durable)


@pytest.fixture(scope="module")
def indexer():
    with Indexer() as process:
        yield process


@pytest.mark.parametrize("how", [IMMEDIATE, KILL])
def test_what_was_said_to_be_committed_is_there_when_the_server_is_stopped_at_once(tmp_path, durable, scene, indexer, how):
    history = ServerHistory(scene, tmp_path, durable, from_earlier=False)
    assert history.run(indexer, when_done(history, how)).status
    history.finish(indexer)


def test_stopped_in_the_middle_of_a_transaction_it_loses_nothing_and_goes_on(tmp_path, durable, scene, indexer):
    history = ServerHistory(scene, tmp_path, durable, from_earlier=True)
    with history.slow():
        assert history.run(indexer, while_writing(durable, 0.05)).was_killed
        assert history.run(indexer, while_writing(durable, 0.25, KILL)).status
        assert history.run(indexer, while_writing(durable, 0.0, IMMEDIATE)).status
    history.finish(indexer)
