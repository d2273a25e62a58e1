"""The page of the service in a real browser, with a stand-in for the server: what it asks, shows, and survives."""

import base64
import io
import json
import re
import threading
from contextlib import contextmanager
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

import fedthe

FOLDER = Path(fedthe.__file__).parent / "deploy" / "service" / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/page.css": ("page.css", "text/css"),
    "/static/page.js": ("page.js", "text/javascript"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
EVIL = "<img src=x onerror=alert(1)>"
CLASSES = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", EVIL]
PICTURES = {"dtype": "uint8", "shape": [32, 32, 3]}
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class StandIn(ThreadingHTTPServer):
    """Behaves as the service does. The red of an image's first pixel says which class it is."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bundles = {"client-3": {"method": "FedTHE", "classes": CLASSES, "input": PICTURES}}
        self.streams, self.made, self.replies = {}, 0, {}
        self.begun = {}  # ids of streams, by the keys that they were made with
        self.log = []  # of requests: method, path
        self.keys = []  # of requests for an answer
        self.token = None
        self.faults = []  # (part of a path, status or None to hang up, headers, after the work is done), used once each
        self.gates = {}  # by position: an event that this answer waits for
        self.most = self.busy = 0  # requests at once
        self.statuses = lambda position: "calm"
        self.heads = True
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"

    def asked(self, method):
        return [path for way, path in self.log if way == method]

    def answer(self, stream, content):
        try:
            red = Image.open(io.BytesIO(content)).convert("RGB").getpixel((0, 0))[0]
        except OSError:
            return 400, {"error": "the image cannot be read; send a PNG or JPEG file."}
        stream["position"] += 1
        position, index = stream["position"], red // 25
        classes = self.bundles[stream["bundle"]]["classes"]
        if position in self.gates:
            assert self.gates[position].wait(10)
        rest = 0.4 / (len(classes) - 1)
        weight = (position * 0.17) % 1 if self.heads else None
        heads = {"global": classes[index], "personal": classes[(index + 1) % len(classes)]} if self.heads else None
        why = f"the global head says {classes[index]}" if self.heads else "one model answers"
        stream["status"] = self.statuses(position)
        return 200, {
            "label": classes[index],
            "index": index,
            "probability": 0.6,
            "probabilities": {name: 0.6 if name == classes[index] else rest for name in classes},
            "weight": weight,
            "heads": heads,
            "why": why,
            "status": stream["status"],
            "position": position,
        }


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, status, said, headers=()):
        kind, content = said if isinstance(said, tuple) else ("application/json", json.dumps(said).encode())
        content = b"" if status == 204 else content
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Security-Policy", POLICY), *headers):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle_any(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.command == "GET" and self.path in FILES:
            name, kind = FILES[self.path]
            self.reply(200, (kind, (FOLDER / name).read_bytes()))
            return
        with server.lock:
            server.busy += 1
            server.most = max(server.most, server.busy)
            server.log.append((self.command, self.path))
        try:
            try:
                answer = self.work(body)
            finally:
                with server.lock:
                    server.busy -= 1  # before it replies, for the page may ask again at once
            self.reply(*answer)
        except ConnectionError:
            self.close_connection = True  # without a word

    def work(self, body):
        server = self.server
        if server.token is not None and self.headers.get("Authorization") != f"Bearer {server.token}":
            return 401, {"error": "send a token: Authorization: Bearer TOKEN."}
        fault = next((each for each in server.faults if each[0] in self.path), None)
        if self.path.endswith("/predict"):
            server.keys.append(self.headers["Idempotency-Key"])
        if fault:
            server.faults.remove(fault)
            _, status, headers, late = fault
            if late:
                self.do(body)
            if status is None:
                raise ConnectionError
            return status, {"error": f"trouble number {status}."}, headers
        return self.do(body)

    def do(self, body):
        server, (_, *path) = self.server, self.path.split("/")
        if path == ["bundles"]:
            return 200, {"bundles": [{"name": name, **about} for name, about in server.bundles.items()]}
        if path == ["streams"]:
            made = server.begun.get(self.headers["Idempotency-Key"])
            if made in server.streams:
                return 201, server.streams[made]
            server.made += 1
            id = f"s_{server.made}"
            server.begun[self.headers["Idempotency-Key"]] = id
            server.streams[id] = {"id": id, "bundle": json.loads(body)["bundle"], "position": 0, "status": None}
            return 201, server.streams[id]
        if path[1] not in server.streams:
            return 404, {"error": "there is no such stream."}
        stream = server.streams[path[1]]
        if self.command == "DELETE":
            del server.streams[path[1]]
            return 204, None
        if path[2:] == ["reset"]:
            stream.update(position=0, status=None)
        if path[2:] == ["predict"]:
            key = (path[1], self.headers["Idempotency-Key"])
            if key not in server.replies:
                head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
                (part,) = message_from_bytes(head + body).get_payload()
                assert part.get_param("name", header="Content-Disposition") == "image"
                server.replies[key] = server.answer(stream, part.get_payload(decode=True))
            return server.replies[key]
        return 200, stream

    do_GET = do_POST = do_DELETE = handle_any


@pytest.fixture
def server():
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@contextmanager
def open_page(browser, server, width=1200, fails=False, **settings):
    """The opened page, which must not complain, and must ask nobody but its server. fails: requests may."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
    context.set_default_timeout(10_000)
    page = context.new_page()
    trouble = []
    page.on("console", lambda said: trouble.append(said.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda asked: asked.url.startswith((server.url, "blob:", "data:")) or trouble.append(asked.url))
    page.goto(server.url)
    if server.token is None and not server.faults:
        page.wait_for_selector("#about:has-text('client-3')")
    yield page
    context.close()
    if fails:  # the browser tells of each
        trouble = [each for each in trouble if not each.startswith("Failed to load resource:")]
    assert trouble == []


def make_image(index, size=32, kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (size, size), (index * 25 + 5, 90, 160)).save(file, kind)
    return file.getvalue()


def make_file(index, name=None):
    return {"name": name or f"{CLASSES[index]}.png", "mimeType": "image/png", "buffer": make_image(index)}


def give(page, event, *files):
    """Drop or paste files on the page."""
    packed = [{**each, "buffer": base64.b64encode(each["buffer"]).decode()} for each in files]
    page.evaluate(
        """([event, files]) => {
          const data = new DataTransfer();
          for (const { name, mimeType, buffer } of files) {
            const bytes = Uint8Array.from(atob(buffer), (letter) => letter.charCodeAt(0));
            data.items.add(new File([bytes], name, { type: mimeType }));
          }
          const settings = { bubbles: true, cancelable: true };
          const made = event === "paste" ? new ClipboardEvent(event, { ...settings, clipboardData: data })
            : new DragEvent(event, { ...settings, dataTransfer: data });
          document.querySelector("#drop").dispatchEvent(made);
        }""",
        [event, packed],
    )


def choose(page, *files):
    page.locator("#files").set_input_files(list(files))


def wait_for(page, samples, label=None):
    """Until nothing is under way: a reloaded page shows what it remembers before its server has confirmed it."""
    page.wait_for_function(
        "(text) => document.querySelector('#length').textContent === text && !document.body.hasAttribute('data-busy')",
        arg=f"{samples} sample{'s' * (samples != 1)}" if samples else "",
    )
    if label is not None:
        assert page.locator("#label").inner_text() == label


def read_table(page):
    """The answers, the first one first."""
    rows = "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.innerText.trim())).reverse()"
    return page.locator("#answers tr").evaluate_all(rows)


def count_points(page, kind):
    return page.locator(f"#plot .point.of-{kind}").count()


def look_for_violations(page):
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(each["id"], each["nodes"][0]["html"]) for each in found]


def read_stored(page, name):
    return page.evaluate("(name) => JSON.parse(sessionStorage.getItem(name))", f"fedthe.{name}")


def test_a_dropped_image_is_answered_with_its_bars_heads_and_weight(browser, server):
    with open_page(browser, server) as page:
        assert page.locator("#about").inner_text() == (
            "client-3: FedTHE, 10 classes. Images are resized to 32 × 32 pixels."
        )
        assert server.asked("POST") == []  # the stream is made for the first image
        assert page.locator("#meaning").inner_text() == "No samples yet."
        give(page, "drop", make_file(3))
        wait_for(page, 1, "cat")
        assert server.asked("POST") == ["/streams", "/streams/s_1/predict"]
        assert UUID.fullmatch(server.keys[0])
        assert page.locator("#probability").inner_text() == "60.0%"
        assert page.locator("#why").inner_text() == "The global head says cat."
        bars = page.locator("#bars li")
        assert bars.count() == 8
        assert bars.first.inner_text().split("\n") == ["cat", "60.0%"]
        whole = page.locator("#bars .bar").first.bounding_box()["width"]
        page.wait_for_function("document.querySelector('#bars i').getAnimations().length === 0")
        assert page.locator("#bars i").first.bounding_box()["width"] == pytest.approx(0.6 * whole, abs=1)
        assert page.locator("#others").inner_text() == "2 other classes: 8.9%"
        assert page.locator("#weight").inner_text() == "0.17"
        meter = page.get_by_role("meter", name="Weight of the global head")
        assert meter.get_attribute("aria-valuenow") == "0.17"
        assert page.locator(".ends").inner_text().split() == ["personal", "global"]
        assert (page.locator("#personal").inner_text(), page.locator("#global").inner_text()) == ("deer", "cat")
        assert (
            page.locator("#live").inner_text() == "Sample 1: cat, 60.0%. The global head says cat. The stream is calm."
        )
        assert page.locator("#picture img").evaluate("(image) => image.decode().then(() => image.naturalWidth)") == 32


def test_several_images_are_answered_one_at_a_time_in_their_order(browser, server):
    order = [5, 0, 9, 2, 2, 7]
    server.gates[3] = threading.Event()
    server.statuses = lambda position: "calm" if position < 5 else "drifting"
    with open_page(browser, server) as page:
        give(page, "drop", *(make_file(index) for index in order[:4]))
        page.wait_for_selector("#doing:has-text('Answering image 3 of 4.')")
        give(page, "paste", *(make_file(index) for index in order[4:]))
        page.wait_for_selector("#doing:has-text('Answering image 3 of 6.')")
        assert page.locator("#reset").get_attribute("aria-disabled") == "true"
        page.locator("#reset").dispatch_event("click")  # waits until the images are answered, or stopped
        server.gates[3].set()
        wait_for(page, 6, "horse")
        assert [row[1] for row in read_table(page)] == [CLASSES[index] for index in order]
        assert server.most == 1
        assert len(set(server.keys)) == len(server.keys) == 6
        assert server.asked("POST").count("/streams") == 1
        assert "/streams/s_1/reset" not in server.asked("POST")
        assert page.locator("#live").inner_text().startswith("6 images answered. The last, sample 6: horse, 60.0%.")


def test_waiting_images_can_be_stopped(browser, server):
    server.gates[1] = threading.Event()
    with open_page(browser, server) as page:
        give(page, "drop", *(make_file(index) for index in (1, 2, 3)))
        page.get_by_role("button", name="Stop").click()
        server.gates[1].set()
        wait_for(page, 1, "car")
        assert len(server.keys) == 1


def test_the_plot_grows_and_the_status_is_told_without_colour(browser, server):
    server.statuses = lambda position: ("calm", "calm", "drifting", "drifting", "collapsed")[min(position, 5) - 1]
    with open_page(browser, server) as page:
        for position, status in enumerate(("calm", "calm", "drifting", "drifting", "collapsed"), 1):
            choose(page, make_file(position))
            wait_for(page, position)
            assert count_points(page, "weight") == count_points(page, "probability") == position
            assert page.locator("#status").inner_text() == status
            assert page.locator("#status use").get_attribute("href") == f"#icon-{status}"
        heights = page.locator("#plot .band").evaluate_all(
            "(all) => all.map((one) => Number(one.getAttribute('height')))"
        )
        assert len(heights) == 3
        assert heights == sorted(set(heights))
        assert page.locator("#plot .named").all_text_contents()[:2] == ["calm", "drifting"]
        assert page.locator("#plot").get_attribute("aria-label").startswith("The stream so far: 5 samples.")
        assert read_table(page)[2] == ["3", "cat", "60.0%", "0.51", "drifting"]

        page.get_by_role("button", name="Show sample 2").click()  # an earlier one again
        assert page.locator("#answer-title").inner_text() == "Answer to sample 2"
        assert page.locator("#label").inner_text() == "bird"
        assert page.locator("#picture figcaption").inner_text() == "bird.png"
        assert page.locator("#status").inner_text() == "collapsed"  # of the stream, now
        box = page.locator("#plot .point.of-weight").nth(3).bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        assert page.locator("#label").inner_text() == "deer"
        assert page.locator("#readout").inner_text().startswith("Sample 4: deer, 60.0%, weight 0.68, drifting.")


def test_a_long_stream_is_drawn_and_kept(browser, server):
    with open_page(browser, server, width=360) as page:
        choose(page, make_file(1))
        wait_for(page, 1)
        stored = read_stored(page, "stream.client-3")
        many = [stored["answers"][0] | {"position": position, "weight": 0.3} for position in range(1201, 1701)]
        server.streams["s_1"]["position"] = 1700
        stored |= {"answers": many, "position": 1700}
        page.evaluate("(kept) => sessionStorage.setItem('fedthe.stream.client-3', JSON.stringify(kept))", stored)
        page.reload()
        page.wait_for_selector("#length:has-text('1,700 samples')")
        choose(page, make_file(2))
        page.wait_for_selector("#length:has-text('1,701 samples')")
        assert len(read_stored(page, "stream.client-3")["answers"]) == 500
        assert page.locator("#answers tr").count() == 50
        assert count_points(page, "weight") == 0  # they would hide the line
        assert "1,701 samples, of which 500 samples are drawn" in page.locator("#plot").get_attribute("aria-label")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_method_with_one_head_shows_no_weight(browser, server):
    server.heads = False
    with open_page(browser, server) as page:
        choose(page, make_file(8))
        wait_for(page, 1, "ship")
        assert page.locator("#why").inner_text() == "One model answers."
        assert not page.locator("#heads").is_visible()
        assert not page.locator("th.of-weight").is_visible()
        assert (count_points(page, "weight"), count_points(page, "probability")) == (0, 1)
        assert look_for_violations(page) == []


def test_a_stream_is_reset_and_replaced(browser, server):
    with open_page(browser, server) as page:
        choose(page, make_file(1), make_file(2))
        wait_for(page, 2)
        page.get_by_role("button", name="Reset stream").click()
        wait_for(page, 0)
        assert server.streams["s_1"]["position"] == 0
        assert not page.locator("#plot").is_visible()
        assert page.locator("#live").inner_text() == "The stream is reset."
        choose(page, make_file(3))
        wait_for(page, 1, "cat")
        assert list(server.streams) == ["s_1"]

        page.get_by_role("button", name="New stream").click()
        wait_for(page, 0)
        assert server.streams == {}
        assert not page.locator("#commands").is_visible()
        choose(page, make_file(4))
        wait_for(page, 1, "deer")
        assert list(server.streams) == ["s_2"]
        assert len(read_table(page)) == 1


def test_a_reload_continues_the_stream(browser, server):
    with open_page(browser, server) as page:
        choose(page, make_file(1), make_file(2))
        wait_for(page, 2)
        page.reload()
        wait_for(page, 2, "bird")
        assert [row[1] for row in read_table(page)] == ["car", "bird"]
        assert server.log[-1] == ("GET", "/streams/s_1")
        choose(page, make_file(3))
        wait_for(page, 3, "cat")
        assert server.made == 1
        server.streams["s_1"]["position"] = 1  # somebody went back
        page.reload()
        wait_for(page, 1, "car")
        assert count_points(page, "weight") == 1
        server.streams["s_1"].update(position=5, status=None)  # somebody went on, and the server does not say how it is
        page.reload()
        wait_for(page, 5, "car")
        assert page.locator("#status").inner_text() == ""
        assert page.locator("#meaning").inner_text() == "The next answer tells its status."
        choose(page, make_file(4))
        wait_for(page, 6, "deer")
        assert page.locator("#plot .line.of-weight").get_attribute("d").count("M") == 2  # a gap, not a line across it


def test_a_stream_that_the_server_lost_is_begun_anew(browser, server):
    with open_page(browser, server, fails=True) as page:
        choose(page, make_file(1))
        wait_for(page, 1)
        server.streams.clear()
        page.reload()
        page.wait_for_selector("#trouble:has-text('The server no longer has the stream')")
        wait_for(page, 0)
        choose(page, make_file(2))
        wait_for(page, 1, "bird")
        assert not page.locator("#trouble").is_visible()
        assert read_stored(page, "stream.client-3")["id"] == "s_2"

        server.streams.clear()  # and now while the page is open
        choose(page, make_file(3), make_file(4))
        wait_for(page, 2, "deer")
        assert [row[1] for row in read_table(page)] == ["cat", "deer"]
        assert page.locator("#trouble").inner_text() == "The server no longer had the stream; this is a new one."
        assert server.made == 3


def test_a_token_is_asked_for_when_the_server_does(browser, server):
    server.token = "secret"
    with open_page(browser, server, fails=True) as page:
        field = page.get_by_label("Token")
        field.wait_for()
        assert page.locator("#token-why").inner_text() == "The server asks for a token."
        assert field.evaluate("(field) => field === document.activeElement")
        assert look_for_violations(page) == []
        field.fill("wrong")
        field.press("Enter")
        page.wait_for_selector("#token-why:has-text('The server does not accept this token.')")
        field.fill("secret")
        page.get_by_role("button", name="Continue").click()
        page.wait_for_selector("#about:has-text('client-3')")
        assert not field.is_visible()
        choose(page, make_file(6))
        wait_for(page, 1, "frog")
        page.reload()
        wait_for(page, 1, "frog")
        assert not field.is_visible()

        server.token = "another"  # in the middle: the images wait
        choose(page, make_file(1), make_file(2))
        field.wait_for()
        field.fill("another")
        field.press("Enter")
        wait_for(page, 3, "bird")
        assert read_stored(page, "token") == "another"


def test_no_token_is_asked_for_without_need(browser, server):
    with open_page(browser, server) as page:
        assert not page.get_by_label("Token").is_visible()


def test_refused_images_are_told_and_the_others_answered(browser, server):
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"no picture"}
    notes = {"name": EVIL, "mimeType": "text/plain", "buffer": b"hello"}
    with open_page(browser, server, fails=True) as page:
        give(page, "drop", make_file(1), broken, notes, make_file(2))
        wait_for(page, 2, "bird")
        assert page.get_by_role("alert").inner_text().split("\n\n") == [
            f"{EVIL}: This is not an image.",
            "broken.png: the image cannot be read; send a PNG or JPEG file.",
        ]
        assert look_for_violations(page) == []
        give(page, "drop", *[broken] * 9)
        page.wait_for_selector("#trouble:has-text('5 more before these.')")
        assert page.locator("#trouble p").count() == 5
        choose(page, make_file(3))
        wait_for(page, 3, "cat")
        assert not page.locator("#trouble").is_visible()


@pytest.mark.parametrize(("status", "late"), [(None, False), (None, True), (503, False), (500, True)])
def test_a_failed_request_is_sent_once_more_with_the_same_key(browser, server, status, late):
    with open_page(browser, server, fails=True) as page:
        server.faults.append(("/predict", status, (), late))
        choose(page, make_file(1), make_file(2))
        wait_for(page, 2, "bird")
        assert [row[1] for row in read_table(page)] == ["car", "bird"]  # counted once, even where the answer was lost
        assert server.keys[0] == server.keys[1] != server.keys[2]
        assert not page.locator("#trouble").is_visible()


def test_a_stream_whose_beginning_got_lost_is_not_made_twice(browser, server):
    with open_page(browser, server, fails=True) as page:
        server.faults += [("/streams", None, (), True)] * 2
        choose(page, make_file(1))
        page.get_by_role("button", name="Try again").click()
        wait_for(page, 1, "car")
        assert server.made == 1


def test_a_stream_that_nobody_watches_says_so(browser, server):
    server.statuses = lambda position: "unwatched"
    with open_page(browser, server) as page:
        choose(page, make_file(1))
        wait_for(page, 1, "car")
        assert page.locator("#status").inner_text() == "unwatched"
        assert page.locator("#meaning").inner_text() == "Nobody looks for drift in this stream."
        assert page.locator("#status use").get_attribute("href") == "#icon-unknown"
        assert page.locator("#status .calm").count() == 0
        assert look_for_violations(page) == []


def test_a_busy_server_is_given_the_time_it_asks_for(browser, server):
    with open_page(browser, server, fails=True) as page:
        server.faults.append(("/predict", 429, (("Retry-After", "2"),), False))
        choose(page, make_file(1))
        page.wait_for_selector("#doing:has-text('The server is busy. Trying again in 2 seconds.')")
        wait_for(page, 1, "car")
        server.faults.append(("/predict", 429, (("Retry-After", "3600"),), False))
        choose(page, make_file(2))
        page.wait_for_selector("#trouble:has-text('trouble number 429.')")
        page.get_by_role("button", name="Try again").click()
        wait_for(page, 2, "bird")


def test_a_server_that_keeps_failing_stops_the_queue(browser, server):
    with open_page(browser, server, fails=True) as page:
        server.faults += [("/predict", 500, (), False), ("/predict", None, (), True)]
        choose(page, make_file(1), make_file(2), make_file(3))
        again = page.get_by_role("button", name="Try again")
        again.wait_for()
        assert page.get_by_role("alert").inner_text() == "car.png: The server does not answer."
        assert page.locator("#doing").inner_text() == "3 images waiting."
        assert len(set(server.keys)) == 1
        assert again.evaluate("(button) => button === document.activeElement")
        assert look_for_violations(page) == []
        server.faults += [("/predict", 502, (), False)] * 2
        again.press("Enter")
        page.wait_for_selector("#trouble:has-text('car.png: trouble number 502.')")
        again.press("Enter")
        wait_for(page, 3, "cat")
        assert [row[1] for row in read_table(page)] == ["car", "bird", "cat"]
        assert not page.locator("#trouble").is_visible()

        server.faults += [("/predict", 500, (), False)] * 2
        choose(page, make_file(4), make_file(5))
        page.get_by_role("button", name="Skip").click()
        wait_for(page, 4, "dog")


def test_the_page_waits_for_a_server_that_starts(browser, server):
    server.faults += [("/bundles", 503, (), False)] * 2
    with open_page(browser, server, fails=True) as page:
        page.get_by_role("button", name="Try again").wait_for()
        assert not page.get_by_role("button", name="Skip").is_visible()
        page.get_by_role("button", name="Try again").click()
        page.wait_for_selector("#about:has-text('client-3')")


def test_bundles_have_a_stream_each(browser, server):
    server.bundles["client-4"] = {"method": "FedAvg", "classes": ["only", "other"], "input": PICTURES}
    server.bundles["words"] = {"method": "FedAvg", "classes": ["a"], "input": {"dtype": "int64", "shape": [64]}}
    with open_page(browser, server) as page:
        bundle = page.get_by_label("Bundle")
        choose(page, make_file(1), make_file(2))
        wait_for(page, 2, "bird")
        bundle.select_option("client-4")
        wait_for(page, 0)
        assert not page.locator("#answered").is_visible()
        choose(page, make_file(0))
        wait_for(page, 1, "only")
        assert {each["bundle"] for each in server.streams.values()} == {"client-3", "client-4"}
        page.reload()
        wait_for(page, 1, "only")
        bundle.select_option("client-3")
        wait_for(page, 2, "bird")
        bundle.select_option("words")
        assert page.locator("#about").inner_text() == (
            "words: FedAvg, 1 class. It takes int64 [64], not images: use the API."
        )
        assert page.locator("#files").is_disabled()


def test_everything_works_with_the_keyboard(browser, server, tmp_path):
    (tmp_path / "cat.png").write_bytes(make_image(3))
    with open_page(browser, server) as page:
        page.on("filechooser", lambda _: None)  # from now on; a listener that comes with the key may come too late
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "files"
        assert page.locator("#drop").evaluate("(field) => getComputedStyle(field).outlineStyle") == "solid"
        for position, key in enumerate(("Enter", "Space"), 1):
            with page.expect_file_chooser() as opened:
                page.keyboard.press(key)
            opened.value.set_files(tmp_path / "cat.png")
            wait_for(page, position, "cat")
        reached = []
        for _ in range(5):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id"))
        assert reached == ["reset", "new", "scroll", "sample-2", "sample-1"]
        page.keyboard.press("Enter")
        assert page.locator("#answer-title").inner_text() == "Answer to sample 1"
        assert page.evaluate("document.activeElement.id") == "sample-1"
        for _ in range(4):
            page.keyboard.press("Shift+Tab")
        page.keyboard.press("Space")
        wait_for(page, 0)
        assert page.evaluate("document.activeElement.id") == "reset"


def test_names_are_text(browser, server):
    with open_page(browser, server) as page:
        choose(page, make_file(9, f"{EVIL}.png".replace("/", "")))
        wait_for(page, 1, EVIL)
        assert page.locator("#why").inner_text() == f"The global head says {EVIL}."
        assert page.locator("main img[src=x]").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_it_fits_and_is_accessible(browser, server, width, scheme, tmp_path):
    server.statuses = lambda position: ("calm", "drifting", "collapsed")[position // 4 % 3]
    server.bundles["client-4"] = server.bundles["client-3"]
    with open_page(browser, server, width=width, color_scheme=scheme, reduced_motion="reduce") as page:
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert dark == (scheme == "dark")
        assert look_for_violations(page) == []
        for length, classes in ((3, (1, 2, 3)), (11, (4, 5, 6, 7, 8, 0, 1, 2))):  # calm, then all three
            choose(page, *(make_file(index) for index in classes))
            wait_for(page, length)
            assert look_for_violations(page) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
        assert page.locator("#drop").bounding_box()["width"] >= 300
        beside = page.locator("#answer").bounding_box()["x"] > page.locator("#drop").bounding_box()["x"] + 100
        assert beside == (width == 1400)
