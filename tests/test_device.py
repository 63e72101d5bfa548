"""Device properties: read, checked before cuDNN sees them, and told apart by what decides which plans fit."""

import json
import threading

import pytest

import plancache
from plancache.cudnn.device import FIELDS, FILLED, FINGERPRINT
from plancache.errors import DeviceError
from tests import graphs


@pytest.fixture
def document(h200):
    return json.loads(h200.to_json())


def test_a_device_is_named_by_name_file_json_descriptor_or_itself(h200, tmp_path):
    file = tmp_path / "device.json"
    file.write_text(h200.to_json())
    for what in ("H200", file, str(file), h200.to_json(), h200.native, h200):
        assert plancache.device(what) == h200
    assert (h200.name, h200.sm_version, h200.sm_count, h200.driver) == ("NVIDIA H200", 900, 132, 13000)


def test_json_goes_out_as_it_came_in(h200, document):
    assert json.loads(plancache.device(json.dumps(document)).to_json()) == document


@pytest.mark.parametrize("field", [field for field in FIELDS if field not in FILLED])
def test_a_missing_field_is_named(document, field):
    del document[field]
    with pytest.raises(DeviceError, match=f"lacks a field; expected {field}") as caught:
        plancache.device(json.dumps(document))
    assert caught.value.field == field


def test_the_fields_that_older_cudnns_do_not_write_are_filled(document, h200):
    older = {name: value for name, value in document.items() if name not in FILLED}
    filled = plancache.device(json.dumps(older))
    assert filled.fingerprint == h200.fingerprint
    assert json.loads(filled.to_json()) == {**document, **FILLED}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("multiProcessorCount", "132", "a whole number"),
        ("deviceVer", 9.0, "a whole number"),
        ("deviceVer", True, "a whole number"),
        ("l2CacheSize", -1, "a whole number"),
        ("l2CacheSize", 2**31, "a whole number"),
        ("deviceName", 200, "a text"),
        ("deviceName", "\ud800", "a text"),
        ("multiProcessorCount", 0, "more than 0"),
        ("driverVer", 0, "more than 0"),
        ("maxGridSize", [1, 2], "three whole numbers"),
        ("maxBlockSize", [1, 2, "3"], "three whole numbers"),
    ],
)
def test_a_mistyped_field_is_named(document, field, value, expected):
    with pytest.raises(DeviceError, match=f"wrong value for {field}") as caught:
        plancache.device(json.dumps({**document, field: value}))
    assert (caught.value.field, caught.value.found, caught.value.expected) == (field, repr(value), expected)


def test_an_unknown_field_is_named_with_the_nearest_known_one(document):
    document["multiProcesorCount"] = document.pop("multiProcessorCount")
    with pytest.raises(DeviceError, match=r"found 'multiProcesorCount'.*Did you mean multiProcessorCount\?"):
        plancache.device(json.dumps(document))


NONSENSE = ["{", "[1, 2]", '{"deviceName": "x"}', "b200x", "/no/such/file.json", "x" * 300, "[" * 200000, "a/\0b", ""]


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_refused(text):
    with pytest.raises(DeviceError, match="found|lacks"):
        plancache.device(text)


def test_a_field_that_is_there_twice_is_refused(h200):
    with pytest.raises(DeviceError, match="there twice"):
        plancache.device(h200.to_json()[:-1] + ',"deviceVer":800}')


def test_a_byte_order_mark_does_not_matter(h200, tmp_path):
    file = tmp_path / "device.json"
    file.write_text(h200.to_json(), encoding="utf-8-sig")
    assert plancache.device(file) == plancache.device("\ufeff" + h200.to_json()) == h200


def test_what_names_no_device_is_refused():
    for what in (1.5, object(), True, b"h200"):
        with pytest.raises(DeviceError, match="names no device"):
            plancache.device(what)


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "driverVer"])
def test_boards_share_unless_they_differ_in_what_decides(document, h200, field):
    value = document[field]
    other = [*value[:2], value[2] + 1] if isinstance(value, list) else value + (" X" if isinstance(value, str) else 1)
    changed = plancache.device(json.dumps({**document, field: other}))
    assert (changed.fingerprint == h200.fingerprint) == (field not in FINGERPRINT)


def test_the_driver_is_not_in_the_fingerprint(document, h200):
    assert plancache.device(json.dumps({**document, "driverVer": 12080})).fingerprint == h200.fingerprint


def test_a_document_that_cudnn_refuses_says_so(run):
    # Right in form; cuDNN itself refuses it. In a process of its own, since cuDNN remembers.
    source = """
import json, plancache
document = json.loads(plancache.device("h200").to_json())
device = plancache.device(json.dumps({**document, "deviceVer": 1}))
try:
    with plancache.target(device): plancache.pygraph()
except plancache.PlanCacheError as error:
    print(type(error).__name__, error)
"""
    assert run(source).startswith("DeviceError cuDNN")


def test_one_descriptor_serves_eight_threads_that_load_at_once(warm, h200):
    failures, done = [], []

    def work():
        try:
            with plancache.target(h200), plancache.open(warm, mode="require-hit") as cache:
                for turn in range(200):
                    graph, _ = (graphs.matmul, graphs.conv)[turn % 2]()
                    done.append(cache.build(graph).source)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(done) == 8 * 200
