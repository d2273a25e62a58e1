// Images go to the server one at a time, in the order in which they came; every answer joins the plot of its stream.

const KEEP = 500; // answers of a stream that the page remembers
const ROWS = 50; // of them in the table
const BARS = 8; // classes with a bar
const LATEST = 4; // errors that are shown at once
const TIMEOUT = 60_000; // milliseconds until a request counts as failed
const PATIENCE = 60; // seconds that the page is willing to wait for a busy server
const MEANINGS = {
  calm: "Nothing unusual has been noticed.",
  drifting: "The images differ from those that the model was validated on.",
  collapsed: "Adaptation went wrong, so the model answers without it until both versions agree again.",
  unwatched: "Nobody looks for drift in this stream.",
};
const STEPS = { calm: 0.3, drifting: 0.65, collapsed: 1 }; // heights in the band, so that it reads without colours

const $ = (selector) => document.querySelector(selector);
const count = (n, noun, nouns = noun + "s") => `${n.toLocaleString("en")} ${n === 1 ? noun : nouns}`;
const clamp = (value) => Math.min(1, Math.max(0, value));
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// Children are text or elements, never markup: names come from users.
function make(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function percent(share) {
  if (share > 0 && share < 0.0005) return "<0.1%";
  if (share < 1 && share > 0.9995) return ">99.9%";
  return `${(100 * share).toFixed(1)}%`;
}

// `why` begins in lower case and has no full stop.
function finish(text) {
  const words = String(text ?? "").trim();
  return words && words[0].toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
}

// crypto.randomUUID is only there over HTTPS and on this machine itself.
function makeKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

function recall(name) {
  try {
    return JSON.parse(sessionStorage.getItem(`fedthe.${name}`));
  } catch {
    return null;
  }
}

function remember(name, value) {
  try {
    if (value === null) sessionStorage.removeItem(`fedthe.${name}`);
    else sessionStorage.setItem(`fedthe.${name}`, JSON.stringify(value));
  } catch {
    // it lasts until the page is left
  }
}

// ---- the server

class Refused extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status;
    this.passing = [0, 408, 429].includes(status) || status >= 500; // it may go well another time
  }
}

// A failed request is sent once more, the same as before. 401 waits for a token first.
async function ask(method, path, { body, headers = {} } = {}) {
  if (typeof askHere === "function") return askHere(method, path, { body }); // a page without a server
  for (let tries = 1; ; ) {
    let reply, said;
    try {
      const allowed = token ? { ...headers, Authorization: `Bearer ${token}` } : headers;
      reply = await fetch(path, { method, body, headers: allowed, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) });
      said = await reply.text();
    } catch {
      if (tries++ > 1) throw new Refused("The server does not answer.");
      await sleep(500);
      continue;
    }
    try {
      said = said ? JSON.parse(said) : null;
    } catch {
      said = undefined;
    }
    if (reply.ok && said !== undefined) return said;
    if (reply.status === 401) {
      await askForToken();
      continue;
    }
    const refused = reply.ok
      ? new Refused("The server's answer cannot be read.")
      : new Refused(typeof said?.error === "string" ? said.error : `The server answered with status ${reply.status}.`, reply.status);
    const seconds = Number(reply.headers.get("Retry-After") ?? 0.5) || 0.5;
    if (!refused.passing || tries++ > 1 || seconds > PATIENCE) throw refused;
    if (seconds >= 2) {
      showDoing(`The server is busy. Trying again in ${count(Math.ceil(seconds), "second")}.`);
      say($("#doing").textContent);
    }
    await sleep(1000 * seconds);
  }
}

let token = recall("token");

function askForToken() {
  const form = $("#token-form");
  $("#token-why").textContent = token ? "The server does not accept this token." : "The server asks for a token.";
  form.hidden = false;
  $("#token").value = "";
  $("#token").focus();
  return new Promise((done) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      token = $("#token").value;
      remember("token", token);
      form.hidden = true;
      $("#files").focus();
      done();
    }, { once: true });
  });
}

// ---- streams: one for each bundle, which lasts as long as the browser's tab

let bundles = [];
let bundle = null; // the chosen one
let shown = null; // the answer whose details are on the page
const streams = new Map(); // by the bundle's name
const pictures = new Map(); // by answer: an address of its image, which is gone after a reload

function streamOf(name) {
  if (!streams.has(name)) {
    const kept = recall(`stream.${name}`);
    const whole = typeof kept?.id === "string" && Array.isArray(kept.answers);
    streams.set(name, whole ? kept : { id: null, position: 0, status: null, answers: [] });
  }
  return streams.get(name);
}

function save(name) {
  const stream = streamOf(name);
  remember(`stream.${name}`, stream.id === null ? null : stream);
}

function drop(answers) {
  for (const answer of answers) {
    if (pictures.has(answer)) URL.revokeObjectURL(pictures.get(answer));
    pictures.delete(answer);
  }
}

// Take over where the server says that a stream is. What the page knows beyond that, somebody else has reset.
function update(name, { id, position, status }) {
  const stream = streamOf(name);
  drop(stream.answers.filter((answer) => answer.position > position));
  const answers = stream.answers.filter((answer) => answer.position <= position);
  const last = answers.at(-1);
  Object.assign(stream, { id, position, status: status ?? (last?.position === position ? last.status : null), answers });
  save(name);
}

function forget(name) {
  update(name, { id: null, position: 0 });
}

function add(name, said, picture, title) {
  const stream = streamOf(name);
  const all = Object.entries(said.probabilities).sort((a, b) => b[1] - a[1]);
  const { label, probability, why, status, position } = said;
  const answer = {
    label, probability, why, status, position, title, bars: all.slice(0, BARS), others: Math.max(0, all.length - BARS),
    weight: said.weight ?? null, heads: said.heads ?? null,
  };
  update(name, { id: stream.id, position: position - 1 }); // answered before: the same again
  Object.assign(stream, { position, status });
  stream.answers.push(answer);
  stream.answers.splice(0, stream.answers.length - KEEP);
  pictures.set(answer, picture);
  drop(stream.answers.slice(0, -ROWS)); // their images, which take memory
  save(name);
  return answer;
}

const urlOf = (id, action = "") => `streams/${encodeURIComponent(id)}${action}`;

async function begin(name, key) {
  const headers = { "Content-Type": "application/json", "Idempotency-Key": key }; // or a lost answer leaves a stream behind
  update(name, await ask("POST", "streams", { headers, body: JSON.stringify({ bundle: name }) }));
}

// ---- jobs, done one after another

const jobs = [];
let running = false;
let answered = 0; // of the images that came since the page was last idle

async function run() {
  if (running) return;
  running = true;
  while (jobs.length) {
    const job = jobs[0];
    showProgress();
    try {
      await job.work(job);
    } catch (error) {
      if (!(error instanceof Refused)) console.error(error);
      const sentence = error instanceof Refused ? error.message : "This page has made a mistake; reload it.";
      complain(job.title ? `${job.title}: ${sentence}` : sentence);
      if (error.passing && (await askToGoOn(job))) continue;
    }
    jobs.shift();
    if (job.file) answered += 1;
  }
  running = false;
  showProgress();
  answered = 0;
}

function enqueue(...more) {
  if (!running) clearTrouble();
  jobs.push(...more);
  showProgress();
  run();
}

async function load() {
  const { bundles: found } = await ask("GET", "bundles");
  bundles = found;
  const wanted = recall("bundle");
  $("#bundle").replaceChildren(...bundles.map(({ name }) => make("option", { value: name }, name)));
  $("#choose-bundle").hidden = bundles.length < 2;
  if (bundles.length) choose(bundles.some(({ name }) => name === wanted) ? wanted : bundles[0].name);
  else $("#about").textContent = "The server has no bundle yet.";
}

function choose(name) {
  bundle = bundles.find((each) => each.name === name);
  remember("bundle", name);
  $("#bundle").value = name;
  $("#about").textContent = describe(bundle);
  $("#files").disabled = !takesImages(bundle);
  shown = streamOf(name).answers.at(-1) ?? null;
  show();
  if (streamOf(name).id !== null) enqueue({ work: () => check(name) });
}

// Is the stream still there? The server may have been restarted.
async function check(name) {
  try {
    update(name, await ask("GET", urlOf(streamOf(name).id)));
  } catch (error) {
    if (error.status !== 404) throw error;
    lose(name);
  }
  refresh(name);
}

function lose(name) {
  forget(name);
  complain("The server no longer has the stream; a new one starts with the next image.");
}

async function answer(job) {
  const { file, bundle: name } = job;
  try {
    job.content ??= new Blob([await file.arrayBuffer()], { type: file.type }); // a second try sends the same bytes
  } catch {
    throw new Refused("The file cannot be read.", 400);
  }
  const stream = streamOf(name);
  if (stream.id === null) await begin(name, job.key);
  const form = new FormData();
  form.append("image", job.content, file.name || "image");
  let said;
  try {
    said = await ask("POST", urlOf(stream.id, "/predict"), { body: form, headers: { "Idempotency-Key": job.key } });
  } catch (error) {
    if (error.status !== 404 || job.moved) throw error;
    forget(name);
    complain("The server no longer had the stream; this is a new one.");
    Object.assign(job, { moved: true, key: makeKey() });
    return answer(job);
  }
  const before = stream.status;
  const latest = add(name, said, URL.createObjectURL(file), job.title);
  if (bundle.name === name) shown = latest;
  refresh(name);
  const waiting = jobs.filter((each) => each.file).length - 1;
  if (!waiting) announce(latest, answered + 1);
  else if (before !== latest.status && before !== null) say(`From sample ${latest.position} on, the stream is ${latest.status}.`);
}

async function reset(name) {
  try {
    update(name, await ask("POST", urlOf(streamOf(name).id, "/reset")));
    say("The stream is reset.");
  } catch (error) {
    if (error.status !== 404) throw error;
    lose(name);
  }
  refresh(name);
}

async function renew(name) {
  try {
    await ask("DELETE", urlOf(streamOf(name).id));
  } catch (error) {
    if (error.status !== 404) throw error; // it is gone, as wanted
  }
  forget(name);
  say("The next image starts a new stream.");
  refresh(name);
}

function take(files) {
  if (!bundle || !takesImages(bundle) || !files.length) return;
  const isOther = (file) => file.type && !file.type.startsWith("image/");
  const fresh = [...files].filter((file) => !isOther(file));
  enqueue(...fresh.map((file) => ({ file, title: file.name || "image", bundle: bundle.name, key: makeKey(), work: answer })));
  for (const file of [...files].filter(isOther)) complain(`${file.name}: This is not an image.`);
}

const takesImages = ({ input }) => input.dtype === "uint8" && input.shape.length === 3;

function describe({ name, method, classes, input }) {
  const of = `${name}: ${method}, ${count(classes.length, "class", "classes")}`;
  if (!takesImages({ input })) return `${of}. It takes ${input.dtype} [${input.shape.join(", ")}], not images: use the API.`;
  const [height, width, channels] = input.shape;
  return `${of}. Images are resized to ${width} × ${height} pixels${channels === 1 ? " in grey" : ""}.`;
}

// ---- what is shown

function say(sentence) {
  $("#live").textContent = sentence;
}

function announce({ position, label, probability, why, status }, many) {
  const intro = many > 1 ? `${many} images answered. The last, sample ${position}` : `Sample ${position}`;
  say(`${intro}: ${label}, ${percent(probability)}. ${finish(why)} The stream is ${status}.`);
}

const troubles = [];

function complain(sentence) {
  troubles.push(sentence);
  showTrouble();
}

function clearTrouble() {
  troubles.length = 0;
  showTrouble();
}

function showTrouble() {
  const before = troubles.length - LATEST;
  const lines = [...(before > 0 ? [`${before} more before these.`] : []), ...troubles.slice(-LATEST)];
  $("#trouble").replaceChildren(...lines.map((line) => make("p", {}, line)));
  $("#trouble").hidden = !troubles.length;
}

function askToGoOn(job) {
  $("#paused").hidden = false;
  $("#skip").hidden = job.work === load;
  showProgress(true);
  $("#again").focus();
  return new Promise((done) => {
    const decide = (again) => () => {
      $("#paused").hidden = true;
      clearTrouble();
      $("#files").focus();
      done(again);
    };
    $("#again").onclick = decide(true);
    $("#skip").onclick = decide(false);
  });
}

function showDoing(sentence) {
  $("#doing").textContent = sentence;
  $("#progress").hidden = !sentence;
}

function showProgress(paused = false) {
  document.body.toggleAttribute("data-busy", jobs.length > 0);
  const waiting = jobs.filter((job) => job.file).length;
  const total = answered + waiting;
  const doing = total > 1 ? `Answering image ${answered + 1} of ${total}.` : "Answering.";
  showDoing(!waiting ? "" : paused ? `${count(waiting, "image")} waiting.` : doing);
  $("#stop").hidden = waiting < 2;
  for (const command of ["#reset", "#new"]) $(command).setAttribute("aria-disabled", String(jobs.length > 0));
}

function refresh(name) {
  if (name !== bundle.name) return;
  const { answers } = streamOf(name);
  if (!answers.includes(shown)) shown = answers.at(-1) ?? null;
  show();
}

function show() {
  showAnswer();
  showStream();
}

function showAnswer() {
  $("#no-answer").hidden = shown !== null;
  $("#answered").hidden = shown === null;
  $("#picture").hidden = !pictures.has(shown);
  if (!shown) return;
  const isLast = shown === streamOf(bundle.name).answers.at(-1);
  $("#answer-title").textContent = isLast ? "Answer" : `Answer to sample ${shown.position}`;
  if (pictures.has(shown)) showPicture();
  $("#label").textContent = shown.label;
  $("#probability").textContent = percent(shown.probability);
  $("#why").textContent = finish(shown.why);
  $("#bars").replaceChildren(...shown.bars.map(([name, share]) => {
    const bar = make("i");
    bar.style.width = `${100 * clamp(share)}%`;
    return make("li", {},
      make("span", { class: "name", title: name }, name), make("span", { class: "bar", "aria-hidden": "true" }, bar),
      make("span", { class: "number" }, percent(share)));
  }));
  const rest = 1 - shown.bars.reduce((sum, [, share]) => sum + share, 0);
  $("#others").textContent = shown.others ? `${count(shown.others, "other class", "other classes")}: ${percent(clamp(rest))}` : "";
  $("#heads").hidden = shown.weight === null && shown.heads === null;
  $("#balance").hidden = shown.weight === null;
  if (shown.weight !== null) showWeight(clamp(shown.weight));
  $("#says").hidden = shown.heads === null;
  for (const head of shown.heads ? ["personal", "global"] : []) {
    $(`#${head}`).textContent = shown.heads[head];
    $(`#${head}`).className = shown.heads[head] === shown.label ? "wins" : "";
  }
}

function showPicture() {
  const image = $("#picture img");
  if (image.getAttribute("src") !== pictures.get(shown)) {
    image.onload = () => image.classList.toggle("tiny", image.naturalWidth < 200);
    image.onerror = () => { $("#picture").hidden = true; }; // a format that the browser does not show
    image.src = pictures.get(shown);
  }
  image.alt = `The image of sample ${shown.position}`;
  $("#picture figcaption").textContent = shown.title;
}

function showWeight(weight) {
  $("#weight").textContent = weight.toFixed(2);
  const meter = $("#meter");
  meter.setAttribute("aria-valuenow", weight.toFixed(2));
  meter.querySelector(".needle").style.left = `${100 * weight}%`;
  const fill = meter.querySelector(".fill").style;
  fill.left = `${100 * Math.min(weight, 0.5)}%`;
  fill.width = `${100 * Math.abs(weight - 0.5)}%`;
}

const lookOf = (status) => (Object.hasOwn(STEPS, status) ? status : "unknown");

function makeStatus(status) {
  const icon = make("svg:svg", { "aria-hidden": "true" }, make("svg:use", { href: `#icon-${lookOf(status)}` }));
  return make("span", { class: `status ${lookOf(status)}` }, icon, status);
}

function showStream() {
  const stream = streamOf(bundle.name);
  const { answers, position, status } = stream;
  const known = position > 0 && status;
  $("#status").replaceChildren(...(known ? [makeStatus(status)] : []));
  $("#length").textContent = position ? count(position, "sample") : "";
  const unknown = position ? "The next answer tells its status." : "No samples yet.";
  $("#meaning").textContent = known ? MEANINGS[status] ?? "" : unknown;
  $("#commands").hidden = stream.id === null;
  $("#drawn").hidden = !answers.length;
  $("#drawn").classList.toggle("single", answers.every(({ weight }) => weight === null));
  $("#answers").replaceChildren(...answers.slice(-ROWS).reverse().map(makeRow));
  drawPlot();
}

function makeRow(answer) {
  const picture = pictures.get(answer);
  const image = picture ? make("img", { src: picture, alt: "", decoding: "async", loading: "lazy", onerror: (event) => event.target.remove() }) : null;
  const view = () => {
    shown = answer;
    show();
    $(`#sample-${answer.position}`)?.focus();
  };
  const button = make("button", {
    type: "button", id: `sample-${answer.position}`, title: answer.title, "aria-label": `Show sample ${answer.position}`,
    "aria-current": answer === shown ? "true" : null, onclick: view,
  }, image, String(answer.position));
  return make("tr", {},
    make("td", {}, button), make("td", {}, answer.label), make("td", { class: "number" }, percent(answer.probability)),
    make("td", { class: "number of-weight" }, answer.weight === null ? "–" : answer.weight.toFixed(2)),
    make("td", {}, makeStatus(answer.status)));
}

// ---- the plot

const LEFT = 30, TOP = 8, BAND = 22, BELOW = 36; // pixels around the lines: labels; the band, and the axis under it
let place = null; // where samples are drawn: x by position

function drawPlot() {
  const { answers, position } = streamOf(bundle.name);
  const plot = $("#plot");
  const { width, height } = plot.getBoundingClientRect();
  if (!answers.length || !width) return;
  const first = answers[0].position;
  const last = answers.at(-1).position;
  const step = (width - LEFT - 6) / (Math.max(last, first + 9) - first + 1);
  const bottom = height - BELOW - BAND;
  const x = (at) => LEFT + (at - first + 0.5) * step;
  const y = (share) => bottom - clamp(share) * (bottom - TOP);
  place = { first, step, answers };
  const parts = [0, 0.5, 1].flatMap((share) => [
    make("svg:line", { class: "grid", x1: LEFT, x2: width, y1: y(share), y2: y(share) }),
    make("svg:text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, String(share)),
  ]);
  for (const at of ticks(first, Math.max(last, first + 9), width / 60)) {
    parts.push(make("svg:text", { x: x(at), y: height - 4, "text-anchor": "middle" }, at.toLocaleString("en")));
  }
  if (answers.includes(shown)) {
    parts.push(make("svg:line", { class: "rule", x1: x(shown.position), x2: x(shown.position), y1: TOP, y2: height - 18 }));
  }
  for (const name of ["probability", "weight"]) {
    const points = answers.filter((answer) => answer[name] !== null).map((answer) => [x(answer.position), y(answer[name]), answer.position]);
    const path = points.map(([px, py, at], i) => `${i && points[i - 1][2] === at - 1 ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
    parts.push(make("svg:path", { class: `line of-${name}`, d: path }));
    points.forEach(([px, py, at], i) => {
      const alone = points[i - 1]?.[2] !== at - 1 && points[i + 1]?.[2] !== at + 1;
      if (step < 9 && !alone) return;
      const shape = name === "weight" ? `m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0` : "m0-4.5 4.5 4.5-4.5 4.5-4.5-4.5Z";
      parts.push(make("svg:path", { class: `point of-${name}`, d: `M${px} ${py}${shape}` }));
    });
  }
  parts.push(...drawBand(answers, (at) => x(at) - step / 2, height - 18));
  plot.replaceChildren(...parts);
  const gone = position > answers.length ? `, of which ${count(answers.length, "sample")} are drawn` : "";
  plot.setAttribute("aria-label", `The stream so far: ${count(position, "sample")}${gone}. The table below has the numbers.`);
  $("#readout").textContent = tell(shown);
}

function drawBand(answers, edge, bottom) {
  const runs = [];
  for (const { position, status } of answers) {
    const open = runs.at(-1);
    if (open?.status === status && open.end === position - 1) open.end = position;
    else runs.push({ status, start: position, end: position });
  }
  return runs.flatMap(({ status, start, end }) => {
    const look = lookOf(status);
    const from = edge(start), to = edge(end + 1), tall = (BAND - 12) * (STEPS[status] ?? 0.1);
    const named = to - from > 8 * status.length;
    const group = make("svg:g", { class: look },
      make("svg:rect", { class: "band", x: from, y: bottom - tall, width: Math.max(1, to - from - 1), height: tall, rx: 1 }));
    if (named) group.append(make("svg:text", { class: "named", x: from + 1, y: bottom - tall - 4 }, status));
    return [group];
  });
}

// Whole numbers, at most `most` of them, from the first on.
function ticks(from, to, most) {
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
  const every = steps.find((each) => (to - from + 1) / each <= Math.max(2, most)) ?? 1000;
  const begin = Math.ceil(from / every) * every;
  return Array.from({ length: Math.floor((to - begin) / every) + 1 }, (_, i) => begin + i * every);
}

function tell(answer) {
  if (!answer) return "";
  const weight = answer.weight === null ? "" : `, weight ${answer.weight.toFixed(2)}`;
  return `Sample ${answer.position}: ${answer.label}, ${percent(answer.probability)}${weight}, ${answer.status}.`;
}

function pointAt(event) {
  const at = place.first + (event.clientX - $("#plot").getBoundingClientRect().left - LEFT) / place.step - 0.5;
  return place.answers.reduce((best, each) => (Math.abs(each.position - at) < Math.abs(best.position - at) ? each : best));
}

// ---- what a person does

$("#files").addEventListener("change", (event) => {
  take(event.target.files);
  event.target.value = ""; // the same file may be chosen again
});
document.addEventListener("paste", (event) => take(event.clipboardData.files));
document.addEventListener("dragover", (event) => {
  event.preventDefault(); // a file that misses the field must not replace the page
  document.body.classList.toggle("dragging", event.dataTransfer.types.includes("Files"));
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dragging");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  take(event.dataTransfer.files);
});
$("#stop").addEventListener("click", () => {
  jobs.splice(1, jobs.length, ...jobs.slice(1).filter((job) => !job.file));
  showProgress();
  $("#files").focus();
});
for (const [command, work] of [["#reset", reset], ["#new", renew]]) {
  $(command).addEventListener("click", () => {
    const { name } = bundle;
    if (!jobs.length) enqueue({ work: () => work(name) });
  });
}
$("#bundle").addEventListener("change", (event) => choose(event.target.value));
$("#plot").addEventListener("pointermove", (event) => { $("#readout").textContent = tell(pointAt(event)); });
$("#plot").addEventListener("pointerleave", () => { $("#readout").textContent = tell(shown); });
$("#plot").addEventListener("click", (event) => {
  shown = pointAt(event);
  show();
});
new ResizeObserver(() => { if (bundle) drawPlot(); }).observe($("#plot"));

enqueue({ work: load });
