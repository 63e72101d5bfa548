"""A stored graph, declared again with the way in which its plan was chosen, has the key that it was stored under."""

import cudnn
import pytest

from plancache.cudnn import frontend, plans, requests
from plancache.cudnn.plans import Choice
from plancache.cudnn.rebuild import DocumentError
from tests import graphs

MODES = cudnn.heur_mode


def filtered():
    graph, _ = graphs.matmul()
    graph.deselect_engines(["eng4_k24=1", "eng0"])
    graph.deselect_workspace_greater_than(1 << 20)
    graph.deselect_numeric_notes([cudnn.numerical_note.TENSOR_CORE])
    graph.select_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])
    return graph


@pytest.mark.parametrize(
    ("declare", "choice"),
    [
        (lambda: graphs.matmul()[0], {}),
        (lambda: graphs.sdpa()[0], {"heuristics": [MODES.B, MODES.A]}),
        (lambda: graphs.conv()[0], {"plan": (4, {cudnn.knob_type(12): 3})}),
        (filtered, {}),
    ],
)
def test_the_request_of_stored_documents_has_the_same_key(targeted, declare, choice):
    graph = declare()
    wanted = plans.declare(graph).request(graph, Choice(**choice))
    again = requests.request(wanted.key.documents, device=targeted, builder="a.b")
    assert again.key == wanted.key
    assert again.key.documents == wanted.key.documents
    assert again.builder == "a.b"


def test_a_twin_has_the_filters_and_leaves_the_request_alone(targeted):
    graph = filtered()
    wanted = plans.declare(graph).request(graph, Choice())
    twin = requests.twin(wanted, device=targeted)
    assert frontend.filters(twin) == frontend.filters(graph)
    assert plans.declare(twin).request(twin, Choice()).key == wanted.key
    twin.validate()
    assert not frontend.is_validated(graph)


@pytest.mark.parametrize(
    "changes",
    [
        {"heuristics": ["NO_SUCH_MODE"]},
        {"policy": "NO_SUCH_POLICY"},
        {"engine": 4, "knobs": [["NO_SUCH_KNOB", 1]]},
        {"notes": [["behavior", "NO_SUCH_NOTE", True]]},
        {"workspace_limit": 1, "late_workspace_limit": True},
    ],
)
def test_a_way_of_choosing_that_cannot_be_repeated_is_an_error_that_says_so(targeted, changes):
    graph, _ = graphs.matmul()
    documents = plans.declare(graph).request(graph, Choice()).key.documents
    changed = {**documents, "build": {**documents["build"], **changes}}
    with pytest.raises(DocumentError, match="cannot be (repeated|turned into)"):
        requests.request(changed, device=targeted)
