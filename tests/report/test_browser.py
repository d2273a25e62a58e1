"""The page in a real browser: what its script does, what it asks of the network, and who can use it."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest

from fedthe import cli
from fedthe.report.compare import compare_methods
from fedthe.report.data import Page, Score, SeedClients
from fedthe.report.gather import gather
from fedthe.report.page import write_page
from fedthe.text import say_points
from helpers import RESULTS
from report_pages import FIGURE_CONFIG, make_page, make_shown

EVIL = "<img src=x onerror=alert(1)>"


@contextmanager
def open_page(browser, page, folder, width=1200, **settings):
    """A page, written and opened."""
    write_page(page, folder / "page.html")
    with open_file(browser, folder / "page.html", width, **settings) as opened:
        yield opened


@contextmanager
def open_file(browser, path, width=1200, **settings):
    """An opened page, which must not complain, and must ask for nothing but itself."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
    opened = context.new_page()
    trouble = []
    opened.on("console", lambda said: trouble.append(said.text))
    opened.on("pageerror", lambda error: trouble.append(str(error)))
    opened.on("dialog", lambda dialog: (trouble.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    opened.on(
        "request", lambda asked: None if asked.url.startswith((path.as_uri(), "data:")) else trouble.append(asked.url)
    )
    opened.goto(path.as_uri())
    yield opened
    context.close()
    assert trouble == []


def scroll_through(page):
    """Until every chart is drawn: they are when they come into sight."""
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
    page.wait_for_function("[...document.querySelectorAll('.chart')].every((chart) => chart.querySelector('svg'))")


def click_row(page, chart, row, rows):
    """The middle of a row, right of the left edge."""
    chart.scroll_into_view_if_needed()
    box = chart.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 12, box["y"] + box["height"] * (row + 0.5) / rows)
    page.wait_for_timeout(100)  # plotly looks at most so often where the mouse is
    page.mouse.click(box["x"] + 12, box["y"] + box["height"] * (row + 0.5) / rows)


def read_table(table):
    return table.evaluate(
        "(table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
    )


def look_for_violations(page):
    from axe_playwright_python.sync_playwright import Axe

    # the inside of a chart is an image to it, and large
    found = Axe().run(page, context={"exclude": [[".chart svg"]]}).response["violations"]
    return [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]


def test_the_demo_ends_with_a_page_that_shows_its_clients(browser, fedthe, tmp_path, monkeypatch):
    """From the command to the browser: real clients, heads, curves and examples."""
    small = {"rounds": 2, "curve": [1], "samples": 4, "clients": 4, "batch": 256, "methods": ["fedavg_ft", "fedthe"]}
    monkeypatch.setattr(cli.run, "DEMO", cli.run.DEMO | small)
    fedthe("demo", "-o", tmp_path / "demo")
    rows = [json.loads(line) for line in (tmp_path / "demo" / "results.jsonl").read_text().splitlines()]
    with open_file(browser, tmp_path / "demo" / "report.html") as page:
        assert page.locator("h1").inner_text() == "demo"
        click_row(page, page.locator("#clients .chart").first, 2, 4)
        page.wait_for_selector("#client h3:has-text('Client 2, seed 0')")
        own = read_table(page.locator("#client table").first)
        mine = [row["accuracy"] for row in rows if (row["method"], row["client"]) == ("fedthe", 2)]
        assert [row[3] for row in own[1:]] == [f"{percent:.1f}" for percent in mine]
        names = page.locator("#results-table tbody th")
        page.locator("#results-table th", has_text="original").first.get_by_role("button").click()
        means = {
            m: [row["accuracy"] for row in rows if (row["method"], row["test"]) == (m, "original")]
            for m in small["methods"]
        }
        best = max(means, key=lambda method: sum(means[method]))
        assert names.first.inner_text() == {"fedavg_ft": "FedAvg + FT", "fedthe": "FedTHE"}[best]
        scroll_through(page)
        assert page.locator("#curves .chart").count() == 6 + 1  # a panel for every test, and the loss
        images = page.locator("#examples img")
        assert images.count() >= 6 * 4
        assert images.evaluate_all("(all) => all.every((image) => image.naturalWidth === 24)")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.get_by_role("combobox", name="Theme").select_option("dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
        for width in (1200, 400):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.screenshot(path=tmp_path / f"demo-{width}.png", full_page=True)


def test_a_client_is_chosen_by_mouse_and_by_keyboard(browser, tmp_path):
    shown = make_shown(methods=("fedavg", "fedthe"), clients=5, seeds=(0, 1), rounds=8)
    with open_page(browser, Page("A page", [shown]), tmp_path) as page:
        panel, heat, bars = page.locator("#client"), *page.locator("#clients .chart").all()
        click_row(page, heat, 3, 5)
        page.wait_for_selector("#client h3:has-text('Client 3, seed 0')")
        clients = shown.clients["0"]
        wanted = [[title, f"{clients.scores['fedthe'][test][3]:.1f}"] for test, title in shown.tests.items()]
        own = read_table(panel.locator("table").first)
        assert own[0] == ["test", "global head", "personal head", "ensemble (FedTHE)"]
        assert [[row[0], row[3]] for row in own[1:]] == wanted
        heads = clients.heads["fedthe"]["ooc"]
        assert own[4][1:3] == [f"{heads['global'][3]:.1f}", f"{heads['personal'][3]:.1f}"]
        everyone = read_table(panel.locator("table").nth(1))
        assert everyone[1][:2] == ["FedAvg", f"{clients.scores['fedavg']['original'][3]:.1f}"]
        most = max(range(10), key=lambda c: clients.mix[3][c])
        assert f"{clients.mix[3][most]} of class {most}" in panel.inner_text()

        click_row(page, bars, 1, 5)
        page.wait_for_selector("#client h3:has-text('Client 1, seed 0')")

        page.get_by_role("combobox", name="Client", exact=True).focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_selector("#client h3:has-text('Client 2, seed 0')")

        page.get_by_role("combobox", name="Seed").select_option("1")
        page.locator("#clients").get_by_role("combobox", name="Method").select_option("fedavg")
        page.wait_for_selector("#client h3:has-text('Client 2, seed 1')")
        own = read_table(panel.locator("table").first)
        assert own[1] == ["original", f"{shown.clients['1'].scores['fedavg']['original'][2]:.1f}"]


def test_the_first_client_shown_has_results(browser, tmp_path):
    shown = make_shown(methods=("fedavg",), clients=4)
    clients = {
        seed: replace(
            of, heads={}, scores={m: {t: [None, None, *p[2:]] for t, p in s.items()} for m, s in of.scores.items()}
        )
        for seed, of in shown.clients.items()
    }
    with open_page(browser, Page("A page", [replace(shown, clients=clients)]), tmp_path) as page:
        page.wait_for_selector("#client h3:has-text('Client 2, seed 0')", state="attached")


def test_columns_are_sorted_both_ways_by_what_is_shown(browser, tmp_path):
    shown = make_shown(methods=("fedavg", "gma", "fedthe"), clients=4, seeds=(0, 1), rounds=8)
    del shown.scores["gma"]["ooc"]
    with open_page(browser, Page("A page", [shown]), tmp_path) as page:
        head = page.locator("#results-table th", has_text="out-of-client").first
        names = page.locator("#results-table tbody th")

        def rank(kind, reverse):
            return sorted(("fedavg", "fedthe"), key=lambda m: getattr(shown.scores[m]["ooc"], kind), reverse=reverse)

        for reverse, direction in ((True, "descending"), (False, "ascending")):
            head.get_by_role("button").press("Enter")
            assert head.get_attribute("aria-sort") == direction
            assert names.all_inner_texts() == [*(shown.methods[m] for m in rank("mean", reverse)), "GMA"]
        caption = page.locator("#results-table caption")
        assert "Accuracy (%), mean over clients and seeds ±" in caption.inner_text()
        page.get_by_label("Show").select_option("worst")
        assert head.get_attribute("aria-sort") == "ascending"
        assert names.all_inner_texts()[:2] == [shown.methods[m] for m in rank("worst", False)]
        assert "worst client of each test, mean over seeds." in caption.inner_text()
        assert "±" not in page.locator("#results-table").inner_text()
        worst = f"{shown.scores['fedthe']['ooc'].worst:.1f}"
        assert worst in page.locator("#results-table tr", has_text="FedTHE").inner_text()
        head.get_by_role("button").click()
        assert names.all_inner_texts()[:2] == [shown.methods[m] for m in rank("worst", True)]
        page.locator("#results-table th", has_text="method").get_by_role("button").click()
        assert page.locator("#results-table th[aria-sort]").count() == 1


def test_the_first_click_shows_the_best_first_and_words_from_a(browser, tmp_path):
    with open_page(browser, make_page(methods=("fedthe", "fedavg"), clients=2), tmp_path) as page:
        first = {}
        for head in page.locator("#results-table thead th").all():
            head.get_by_role("button").click()
            first[head.inner_text().strip("\xa0↕↑↓")] = head.get_attribute("aria-sort")
        upwards = [name for name, direction in first.items() if direction == "ascending"]
        assert upwards == ["method", "ms per sample", "passes per sample"]
        assert set(first.values()) == {"ascending", "descending"}


def test_numbers_are_rounded_alike_by_the_table_and_the_script(browser, tmp_path):
    values = [6.25, 16.25, 6.35, 12.54996, 0.05, 0.15, 99.95, 0.25, 0.75, 6.350000000000001, 100.0]
    methods = {f"m{i}": f"m{i}" for i in range(len(values))}
    scores = {
        method: {"original": Score(value, None, 0.0), "ooc": Score(value, None, 0.0)}
        for method, value in zip(methods, values, strict=True)
    }
    tests = {"original": "original", "ooc": "out-of-client"}
    shown = replace(make_shown(clients=2), methods=methods, tests=tests, scores=scores)
    with open_page(browser, Page("A page", [shown]), tmp_path) as page:
        page.locator("#trade summary").click()
        wanted = [say_points(value) for value in values]
        assert wanted[:4] == ["6.2", "16.2", "6.3", "12.6"]  # to three decimals, then half to even
        assert [row[1].split("\n")[0] for row in read_table(page.locator("#results-table"))[1:]] == wanted
        assert [row[1] for row in read_table(page.locator("#trade table"))[1:]] == wanted
        assert [row[2] for row in read_table(page.locator("#trade table"))[1:]] == wanted


def test_one_round_is_a_point_and_rounds_are_whole(browser, tmp_path):
    for rounds, ticks in ((1, ["1"]), (4, ["1", "2", "3", "4"])):
        shown = replace(make_shown(methods=("fedavg",), clients=2, rounds=rounds), curves={})
        with open_page(browser, Page("Short", [shown]), tmp_path) as page:
            page.locator("#curves .chart").scroll_into_view_if_needed()
            page.wait_for_selector("#curves .chart .scatterlayer .point")
            assert page.locator("#curves .chart .point").count() == rounds
            assert page.locator("#curves .xtick").all_text_contents() == ticks


def test_heads_of_rows_and_columns_stay_in_sight(browser, tmp_path):
    runs = [make_shown(f"run {i}", clients=2, seeds=(0,), rounds=4) for i in range(4)]
    with open_page(browser, Page("Long", runs), tmp_path, 400) as page:
        region = page.locator("#results .scroll")
        assert region.bounding_box()["height"] < 730  # of 900
        before = region.bounding_box()
        region.evaluate("(region) => region.scrollTo(200, 500)")
        corner = page.locator("#results-table thead th").first.bounding_box()
        assert (corner["x"], corner["y"]) == pytest.approx((before["x"], before["y"]), abs=1)
        page.emulate_media(media="print")
        assert region.evaluate("(region) => region.clientHeight === region.scrollHeight")


def test_charts_say_of_which_run_they_are(browser, tmp_path):
    runs = [make_shown(name, methods=("fedavg",), clients=2, rounds=4) for name in ("one", "<i>two</i>")]
    with open_page(browser, Page("Two", runs), tmp_path) as page:
        page.select_option("#run", "1")
        page.emulate_media(media="print")
        for section in ("trade", "clients", "curves", "examples"):
            assert page.locator(f"#{section} .of-run").inner_text() == "Run: <i>two</i>"
    with open_page(browser, Page("One", runs[:1]), tmp_path) as page:
        assert page.locator(".of-run").count() == 0


def test_long_names_of_classes_are_cut(browser, tmp_path):
    long = "class " * 50 + "end"
    shown = make_shown(methods=("fedthe",), clients=2, rounds=4, classes=[long, "short"])
    with open_page(browser, Page("Long", [shown]), tmp_path) as page:
        examples = page.locator("#examples")
        assert "end" not in examples.inner_text()
        assert examples.locator(f"[title='{long}']").first.inner_text().endswith("…")
        assert examples.locator("span", has_text="short").first.get_attribute("title") is None


@pytest.mark.parametrize("width", [400, 1200])
def test_every_chart_is_drawn_in_both_themes_and_anybody_can_use_it(browser, tmp_path, width):
    page_of_all = replace(
        make_page(methods=("fedavg", "apfl", "fedthe"), clients=6, seeds=(0, 1)), figures=make_figures()
    )
    with open_page(browser, page_of_all, tmp_path, width, color_scheme="light") as page:
        seen = []
        for theme in ("light", "dark"):
            page.get_by_label("Theme").select_option(theme)
            scroll_through(page)
            paper, ink = page.evaluate(
                "[getComputedStyle(document.body).backgroundColor,"
                " getComputedStyle(document.querySelector('#trade .xtick text')).fill]"
            )
            seen.append((paper, ink))
            assert page.evaluate("document.documentElement.scrollWidth") == width
            if width == 1200:  # the same elements at every width
                assert look_for_violations(page) == []
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=tmp_path / f"{width}-{theme}.png", full_page=True)
        (light, dark_ink), (dark, light_ink) = seen
        assert light == "rgb(255, 255, 255)"
        assert light != dark
        assert dark_ink != light_ink
        page.reload()
        assert page.locator("html").get_attribute("data-theme") == "dark"


@pytest.mark.parametrize("width", [400, 1200])
def test_every_point_has_a_label_that_covers_no_other(browser, tmp_path, width):
    """Of all methods of the paper, with real numbers, most of which are close to each other."""
    page_of_all = gather([RESULTS / "main-dir0.1.json"])
    with open_page(browser, page_of_all, tmp_path, width) as page:
        page.locator("#trade .chart").scroll_into_view_if_needed()
        page.wait_for_selector("#trade .annotation-text")
        labels = page.locator("#trade .annotation-text")
        assert sorted(labels.all_text_contents()) == sorted(page_of_all.shown[0].methods.values())
        boxes = [each.bounding_box() for each in labels.all()]
        whole = page.locator("#trade .chart").bounding_box()
        for i, a in enumerate(boxes):
            assert whole["x"] <= a["x"]
            assert a["x"] + a["width"] <= whole["x"] + whole["width"]
            for b in boxes[:i]:
                apart_x = a["x"] + a["width"] <= b["x"] + 1 or b["x"] + b["width"] <= a["x"] + 1
                apart_y = a["y"] + a["height"] <= b["y"] + 4 or b["y"] + b["height"] <= a["y"] + 4  # a line has air
                assert apart_x or apart_y, (a, b)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_fedthe_and_fedthe_plus_are_told_apart_without_hue(browser, tmp_path, theme):
    page_of_both = make_page(methods=("fedavg", "fedthe", "fedthe_plus"), clients=2, rounds=8)
    with open_page(browser, page_of_both, tmp_path, color_scheme=theme) as page:
        points = page.locator("#trade .legend .swatch")
        shades = points.evaluate_all("(all) => all.map((each) => getComputedStyle(each).backgroundColor)")[1:]
        one, other = sorted(luminance([float(part) for part in re.findall(r"[\d.]+", shade)[:3]]) for shade in shades)
        assert (other + 0.05) / (one + 0.05) > 1.8
        assert points.nth(1).get_attribute("class") != points.nth(2).get_attribute("class")
        lines = page.locator("#curves .legend .swatch")
        assert lines.nth(1).get_attribute("data-dash") != lines.nth(2).get_attribute("data-dash")


def luminance(rgb):
    shares = [part / 255 for part in rgb]
    linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_table_that_is_too_wide_says_that_it_scrolls(browser, tmp_path):
    hint = "(region) => getComputedStyle(region, '::before').content"
    with open_page(browser, make_page(methods=("fedavg", "fedthe_plus"), clients=2), tmp_path, 400) as page:
        region = page.locator("#results .scroll")
        page.wait_for_selector("#results .scroll.wide:not(.end)")
        assert "scroll sideways" in region.evaluate(hint)
        first, whole = region.locator("tbody th").first.bounding_box(), region.bounding_box()
        assert first["width"] < 0.35 * whole["width"]  # the numbers have room
        region.evaluate("(region) => region.scrollTo(region.scrollWidth, 0)")
        page.wait_for_selector("#results .scroll.wide.end")
        page.set_viewport_size({"width": 1200, "height": 900})
        page.wait_for_selector("#results .scroll:not(.wide)")
        assert region.evaluate(hint) == "none"


def test_the_system_chooses_the_theme_until_somebody_does(browser, tmp_path):
    with open_page(browser, make_page(methods=("fedavg",), clients=2), tmp_path, color_scheme="dark") as page:
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.emulate_media(color_scheme="light")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)" != dark


def test_names_of_users_are_text_in_every_place(browser, tmp_path):
    loud = EVIL + "<b>b</b>"  # plotly would take this for a bold letter, and $x$ for mathematics
    shown = make_shown(name=EVIL, classes=[loud, "$x^2$"], clients=3, methods=("fedavg", "fedthe"))
    shown = replace(
        shown,
        methods={"fedavg": "<b>M</b> $x$", "fedthe": EVIL},
        tests={test: f"{loud} %{{x}} {i}" for i, test in enumerate(shown.tests)},
        notes=[EVIL],
        failures={EVIL: EVIL},
    )
    with open_page(browser, Page(EVIL, [shown, shown]), tmp_path) as page:
        scroll_through(page)
        page.select_option("#run", "1")
        scroll_through(page)
        for summary in page.locator("summary").all():
            summary.click()
        places = "h1", "header .note", "#results-table", "#client", "#examples", "#clients .legend", "#provenance"
        for place in places:
            assert EVIL in page.locator(place).first.inner_text(), place
        heat, bars = page.locator("#clients .chart").all()
        assert EVIL[:10] in heat.locator(".xtick text").first.text_content()
        labels = page.locator("#trade .chart .infolayer").text_content()
        assert "<b>M</b> $x$" in labels
        assert EVIL[:20] in labels
        for chart, said in ((bars, f"{loud}: "), (heat, f"{loud} %{{x}} 0")):
            click_row(page, chart, 1, 3)
            page.wait_for_function(
                "([chart, said]) => chart.querySelector('.hoverlayer').textContent.includes(said)",
                arg=[chart.element_handle(), said],
                timeout=5000,
            )
        assert page.locator("img:not([src^='data:image/png;base64,'])").count() == 0
        assert page.locator(".chart a").count() == 0
        sources = page.evaluate("[...document.querySelectorAll('.chart image')].map((image) => image.href.baseVal)")
        assert [source[:10] for source in sources] == ["data:image"]  # the heat map


def test_a_run_shows_only_what_it_has(browser, tmp_path):
    whole = make_shown("whole", methods=("fedavg", "fedthe"), clients=3, rounds=8)
    tests = {f"severity{level}": f"severity {level}" for level in (1, 2, 3)}
    scores = {"fedthe": {test: Score(80.0 - i, 1.0, 50.0) for i, test in enumerate(tests)}}
    bare = replace(
        whole, name="bare", tests=tests, scores=scores, clients={}, curves={}, losses=[], examples=[], weights={}
    )
    with open_page(browser, Page("Two", [whole, bare]), tmp_path) as page:
        links = page.locator("nav a:visible")
        assert links.all_inner_texts() == [
            "Results",
            "Statistics",
            "Comparison",
            "ID and OOD",
            "Clients",
            "Curves",
            "Weights",
            "Examples",
            "Provenance",
        ]
        page.get_by_label("Run in the charts").select_option("bare")
        assert links.all_inner_texts() == ["Results", "Statistics", "Severity", "Provenance"]
        assert page.locator("main section:visible").count() == 4
        scroll = page.locator("#severity .chart")
        scroll.scroll_into_view_if_needed()
        page.wait_for_selector("#severity .chart svg .scatterlayer .trace")


def test_what_is_half_there_is_shown_by_half(browser, tmp_path):
    shown = make_shown(methods=("fedavg", "fedthe"), clients=3, seeds=(0,), rounds=8)
    failed = replace(
        shown, name="failed", scores={}, clients={"0": SeedClients(shown.clients["0"].mix, {}, {})}, costs={}
    )
    unknown = replace(shown, name="unknown", classes=[], clients={"0": SeedClients([], shown.clients["0"].scores, {})})
    with open_page(browser, Page("Half", [failed, unknown]), tmp_path) as page:
        assert page.locator("#clients .chart").count() == 1
        assert "rows of" in page.locator("#client").inner_text()
        assert not page.locator("#trade").is_visible()
        page.get_by_label("Run in the charts").select_option("unknown")
        assert page.locator("#clients .chart").count() == 1
        assert read_table(page.locator("#client table").first)[0] == ["test", "FedTHE"]
        assert "class 1" in page.locator("#examples").inner_text()
    with open_page(browser, Page("Figures alone", [], make_figures()), tmp_path) as page:
        assert page.locator("nav a:visible").all_inner_texts() == ["Figures"]


def test_paper_is_light_and_has_every_chart(browser, tmp_path):
    with open_page(browser, make_page(methods=("fedavg", "fedthe"), clients=3), tmp_path, color_scheme="dark") as page:
        page.evaluate(
            """window.printed = [];
            addEventListener("beforeprint", () => {
              const charts = [...document.querySelectorAll(".chart")];
              printed.push(getComputedStyle(document.body).backgroundColor);
              printed.push(charts.filter((chart) => !chart.querySelector("svg")).length);
            });"""
        )
        page.pdf(path=tmp_path / "page.pdf")
        page.emulate_media(media="print")
        assert page.locator("main section:visible").count() == page.locator("main section").count()
        assert page.locator("select:visible, nav:visible").count() == 0
        assert page.evaluate("printed") == ["rgb(255, 255, 255)", 0]
        assert page.locator("html").get_attribute("data-theme") is None  # as it was


def test_without_a_script_the_tables_are_there(browser, tmp_path):
    with open_page(browser, make_page(methods=("fedavg",), clients=2), tmp_path, java_script_enabled=False) as page:
        assert page.locator("#results-table tbody tr").count() == 1
        assert page.locator("#provenance pre").is_visible()
        assert not page.locator("#clients").is_visible()
        assert not page.locator("#theme").is_visible()


def make_figures():
    """Records as `fedthe figure` writes them."""
    tests = {"original": "original", "ooc": "out-of-client"}
    flat = {test: {"mean": 50.0, "std": 1.0} for test in tests}
    over_e = {test: {"mean": [40.0, 60.0, 50.0], "std": [1.0] * 3} for test in tests}
    curves = {
        method: {test: {"mean": [40.0, 50.0], "std": [1.0, 1.0]} for test in tests} for method in ("fedthe", "ours")
    }
    grid = {test: {"mean": [[40.0, 50.0], [60.0, 70.0]]} for test in tests}
    data = {
        "alpha-beta": {"alpha": [0.1, 1.0], "beta": [0.1, 1.0], "accuracy": grid},
        "interpolation-heads": {"e": [0.0, 0.5, 1.0], "shared": over_e, "best": flat, "fedthe": flat},
        "curves-dir0.1": {"rounds": [1, 2], "curves": curves, "speed": {}},
    }
    return [{"id": id, "title": id, "tests": tests, "config": FIGURE_CONFIG, "data": each} for id, each in data.items()]


def test_two_methods_are_compared_and_the_other_way_around(browser, tmp_path):
    shown = make_shown(methods=("fedavg", "fedthe", "t3a"), clients=5, rounds=4)
    rows = compare_methods(shown, "fedavg", "t3a").rows
    with open_page(browser, Page("One", [shown]), tmp_path) as page:
        section = page.locator("#comparison")
        first, second = section.locator("select").all()
        first.select_option("fedavg")
        second.select_option("t3a")
        cells = section.locator("tbody tr").nth(0).locator("td").all_inner_texts()
        row = rows["original"]
        signed = [f"{each:+.1f}".replace("-", "−") for each in (row.difference, row.low, row.high)]
        assert cells[:4] == [f"{row.a:.1f}", f"{row.b:.1f}", signed[0], f"{signed[1]} to {signed[2]}"]
        assert cells[5] == f"{row.higher} / {row.lower}"
        first.select_option("t3a")
        assert "Choose two different methods." in section.inner_text()
        second.select_option("fedavg")
        turned = section.locator("tbody tr").nth(0).locator("td").all_inner_texts()
        assert (turned[:2], turned[4], turned[5]) == (cells[1::-1], cells[4], f"{row.lower} / {row.higher}")
        more, less = (f"{-each:+.1f}".replace("-", "−") for each in (row.low, row.high))
        assert turned[3] == f"{less} to {more}"
