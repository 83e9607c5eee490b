"""The played bucket is as unkind as the real one."""

import http.client
import json
import statistics
import time
from urllib.parse import quote, urlencode

import pytest
from fakes.gcs import Faults, GcsFake, Latency
from fakes.gcs.weather import Weather

pytest.importorskip("google_crc32c", reason="comes with the gcs extra")

UPLOAD = "/upload/storage/v1/b/bucket/o"


class Client:
    """One connection; no try is repeated."""

    def __init__(self, fake):
        self.fake, self.line = fake, http.client.HTTPConnection("127.0.0.1", fake.port, timeout=10)

    def __call__(self, method, path, body=None, headers=None, **query):
        """(status, the JSON of the answer or its bytes, headers)"""
        url = path + (f"?{urlencode(query)}" if query else "")
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        self.line.request(method, url, data, headers or {})
        reply = self.line.getresponse()
        text = reply.read()
        is_json = reply.headers.get("Content-Type", "").startswith("application/json")
        return reply.status, json.loads(text) if is_json else text, reply.headers

    def put(self, name, data=b"x", **query):
        return self("POST", UPLOAD, data, uploadType="media", name=name, **query)

    def get(self, name, **query):
        return self("GET", at(name), **query)


def at(name, *more):
    return "/".join([f"/storage/v1/b/bucket/o/{quote(name, safe='')}", *more])


@pytest.fixture
def client():
    with GcsFake(soft_delete=True) as fake:
        yield Client(fake)


def test_row_23_one_mutation_of_an_object_a_second():
    with GcsFake.unkind(latency=None, faults=None) as fake:
        client = Client(fake)
        assert client.put("lease")[0] == 200
        began = time.monotonic()
        refused = [
            client.put("lease"),
            client("PATCH", at("lease"), {"metadata": {"a": "b"}}),
            client("DELETE", at("lease")),
            client("POST", at("lease", "moveTo/o/other")),
            client("POST", at("lease", "compose"), {"sourceObjects": [{"name": "lease"}]}),
        ]
        assert [code for code, _, _ in refused] == [429] * 5
        error = refused[0][1]["error"]["errors"][0]
        assert error["reason"] == "rateLimitExceeded" and error["domain"] == "usageLimits"
        assert "bucket/lease exceeded the rate limit for object mutation operations" in error["message"]
        assert client.put("another")[0] == 200  # it is each object's own limit
        assert client.get("lease")[0] == 200  # and none of reads
        while client.put("lease")[0] == 429:  # what was refused does not put it off
            time.sleep(0.02)
        assert 0.9 < time.monotonic() - began < 1.5
        assert fake.bill.classes["refused"] > 5


def test_row_23_answers_take_their_time_and_some_fail_by_the_seed():
    weather = Weather(Latency(), Faults(unavailable=0.05, lost=0.01), seed=7)
    drawn = [weather.draw() for _ in range(4000)]
    waits = sorted(wait for wait, _, _ in drawn)
    assert statistics.median(waits) == pytest.approx(0.060, rel=0.1)
    assert waits[int(0.99 * len(waits))] == pytest.approx(0.300, rel=0.2)
    assert sum(unavailable for _, unavailable, _ in drawn) == pytest.approx(200, rel=0.25)
    assert sum(lost for _, _, lost in drawn) == pytest.approx(40, rel=0.5)
    again = Weather(Latency(), Faults(unavailable=0.05, lost=0.01), seed=7)
    assert [again.draw() for _ in range(4000)] == drawn


def test_row_23_503_is_nothing_done_and_a_lost_answer_is_done():
    with GcsFake(faults=Faults(unavailable=1, lost=0)) as fake:
        code, error, _ = Client(fake).put("a")
        assert code == 503 and error["error"]["errors"][0]["reason"] == "backendError"
        assert fake.buckets["bucket"] == {}
    with GcsFake(faults=Faults(unavailable=0, lost=1)) as fake:
        with pytest.raises(ConnectionError):
            Client(fake).put("a", ifGenerationMatch=0)
        assert fake.buckets["bucket"]["a"].data == b"x"
        fake.weather.faults = None
        assert Client(fake).put("a", ifGenerationMatch=0)[0] == 412  # as who tries again finds


def test_row_23_a_bucket_that_is_away_answers_nothing():
    with GcsFake() as fake:
        fake.away = True
        with pytest.raises(ConnectionError):
            Client(fake).put("a")
        fake.away = False
        assert Client(fake).get("a")[0] == 404


def test_row_23_times_and_generations_are_real(client):
    first = client.put("a")[1]
    assert abs(int(first["generation"]) / 1e6 - time.time()) < 5
    assert first["metageneration"] == "1" and first["updated"] == first["timeCreated"]
    time.sleep(0.01)
    patched = client("PATCH", at("a"), {"metadata": {"k": "v"}})[1]
    assert patched["generation"] == first["generation"] and patched["metageneration"] == "2"
    assert patched["updated"] > patched["timeCreated"] == first["timeCreated"]
    assert patched["etag"] != first["etag"]
    time.sleep(0.01)
    second = client.put("a")[1]
    assert int(second["generation"]) > int(first["generation"]) and second["metageneration"] == "1"
    assert second["timeCreated"] > first["timeCreated"] and "metadata" not in second


def test_row_23_preconditions_hold_on_every_verb(client):
    made = client.put("a", ifGenerationMatch=0)[1]
    right, wrong = {"ifGenerationMatch": made["generation"]}, {"ifGenerationMatch": 1}
    source = {"ifSourceGenerationMatch": 1}
    copies = [at("a", verb) for verb in ("copyTo/b/bucket/o/b", "rewriteTo/b/bucket/o/b", "moveTo/o/b")]
    for refused in (
        client.put("a", ifGenerationMatch=0),
        client.get("a", **wrong),
        client.get("a", alt="media", ifMetagenerationMatch=2),
        client.get("a", ifMetagenerationNotMatch=1),
        client("PATCH", at("a"), {"metadata": {}}, ifMetagenerationMatch=7),
        client("DELETE", at("a"), **wrong),
        client("POST", at("a", "compose"), {"sourceObjects": [{"name": "a"}]}, **wrong),
        *[client("POST", path, **source) for path in copies],
        *[client("POST", path, **wrong) for path in copies],
    ):
        assert refused[0] == 412, refused
        assert refused[1]["error"]["errors"][0]["reason"] == "conditionNotMet"
    assert client.get("a", **right)[0] == 200
    assert client("DELETE", at("a"), **right)[0] == 204


def test_row_23_a_move_is_one_step_and_a_new_generation(client):
    client.put("from", b"new")
    client("PATCH", at("from"), {"metadata": {"gcsfuse_mtime": "now"}})
    old = client.put("to", b"old")[1]
    code, moved, _ = client("POST", at("from", "moveTo/o/to"))
    assert code == 200 and moved["name"] == "to" and moved["metadata"] == {"gcsfuse_mtime": "now"}
    assert int(moved["generation"]) > int(old["generation"]) and moved["metageneration"] == "1"
    assert client.get("from")[0] == 404
    assert client.get("to", alt="media")[1] == b"new"
    assert client("POST", at("none", "moveTo/o/to"))[0] == 404


def test_row_23_a_list_has_pages_of_a_thousand(client):
    for number in range(1200):
        client.put(f"d{number % 2}/{number:04}")
    names, token, pages = [], {}, 0
    while token is not None:
        answer = client("GET", "/storage/v1/b/bucket/o", **token)[1]
        names += [one["name"] for one in answer["items"]]
        pages += 1
        token = {"pageToken": answer["nextPageToken"]} if "nextPageToken" in answer else None
    assert pages == 2 and len(names) == 1200 and names == sorted(names)
    assert client("GET", "/storage/v1/b/bucket/o", maxResults=5000)[1].get("nextPageToken")
    folders = client("GET", "/storage/v1/b/bucket/o", delimiter="/")[1]
    assert folders == {"kind": "storage#objects", "prefixes": ["d0/", "d1/"]}


def test_row_23_a_resumable_upload_is_nothing_until_its_last_byte(client):
    begun = client("POST", UPLOAD, {"name": "big"}, uploadType="resumable", ifGenerationMatch=0)
    place = begun[2]["Location"].removeprefix(client.fake.url)
    piece = b"a" * 262144
    small = client("PUT", place, b"a" * 1000, {"Content-Range": "bytes 0-999/*"})
    assert small[0] == 400
    code, _, headers = client("PUT", place, piece + b"b" * 10, {"Content-Range": f"bytes 0-{262144 + 9}/*"})
    assert code == 308 and headers["Range"] == "bytes=0-262143"  # whole pieces are kept
    assert client.get("big")[0] == 404
    code, made, _ = client("PUT", place, b"b" * 10, {"Content-Range": "bytes 262144-262153/262154"})
    assert code == 200 and made["size"] == "262154"
    assert client("GET", at("big"), headers={"Range": "bytes=262140-262145"}, alt="media")[1] == b"aaaabb"
    lost = client("POST", UPLOAD, {"name": "big"}, uploadType="resumable")[2]["Location"].removeprefix(client.fake.url)
    client.put("big", b"other")
    assert client("PUT", lost, b"mine", {"Content-Range": "bytes 0-3/4"})[0] == 200  # no condition: the last one wins


def test_row_23_what_is_composed_has_no_md5(client):
    one, two = client.put("1", b"a")[1], client.put("2", b"b")[1]
    sources = [{"name": "1", "objectPreconditions": {"ifGenerationMatch": one["generation"]}}, {"name": "2"}]
    made = client("POST", at("1", "compose"), {"sourceObjects": sources}, ifGenerationMatch=one["generation"])[1]
    assert made["componentCount"] == 2 and "md5Hash" not in made and made["size"] == "2"
    assert client("POST", at("3", "compose"), {"sourceObjects": sources})[0] == 412
    assert client("POST", at("3", "compose"), {"sourceObjects": [{"name": "2"}] * 33})[0] == 400
    assert two["md5Hash"]


def test_row_23_what_was_deleted_or_replaced_can_be_restored(client):
    first = client.put("a", b"first")[1]
    client.put("a", b"second")
    client("DELETE", at("a"))
    assert client.get("a")[0] == 404
    kept = client("GET", "/storage/v1/b/bucket/o", softDeleted="true")[1]["items"]
    assert kept[0]["name"] == "a" and kept[0]["softDeleteTime"]
    assert client("POST", at("a", "restore"), generation=first["generation"])[0] == 200
    assert client.get("a", alt="media")[1] == b"first"


def test_row_23_the_bill_has_classes(client):
    client.put("a")
    client.get("a")
    client.get("none")
    client("GET", "/storage/v1/b/bucket/o")
    client("POST", at("a", "moveTo/o/b"))
    client("DELETE", at("b"))
    bill = client.fake.bill
    assert dict(bill.classes) == {"A": 3, "B": 1, "free": 1, "refused": 1}
    assert bill.operations["objects.move"] == 1
    assert bill.per_hour()["A"] > 3
    bill.anew()
    assert bill.per_hour()["A"] == 0


def test_row_23_what_google_does_not_document_is_refused_and_fails_the_test():
    pytest.importorskip("googleapiclient")
    fake = GcsFake()
    with pytest.raises(AssertionError, match="ifGeneration: unknown"), fake:
        client = Client(fake)
        assert client.put("a", ifGeneration=0)[0] == 400
        assert client("PATCH", at("a"), {"metadata": {"a": 1}})[0] == 400
        assert client("POST", at("a", "moveTo/o/b"), updateTime="now")[0] == 400
        assert client("GET", "/storage/v1/b/bucket/o/a/b")[0] == 404  # a slash in a name is %2F
    assert len(fake.complaints) == 3
