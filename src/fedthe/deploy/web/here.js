// Answers what page.js would ask a server, with the model of this folder. Nothing leaves the page.

const KINDS = { "<f4": ["float32", Float32Array], "<f8": ["float64", Float64Array], "<i8": ["int64", BigInt64Array] };
let engine = null; // the promise of { session, Tensor }

function decode(text) {
  const letters = atob(text);
  return Uint8Array.from({ length: letters.length }, (_, i) => letters.charCodeAt(i));
}

function encode(bytes) {
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}

async function start() {
  const address = URL.createObjectURL(new Blob([ONNXRUNTIME.script], { type: "text/javascript" }));
  const ort = await import(address);
  URL.revokeObjectURL(address);
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary = decode(ONNXRUNTIME.wasm).buffer;
  const session = await ort.InferenceSession.create(decode(MODEL.onnx), { executionProviders: ["wasm"] });
  return { session, Tensor: ort.Tensor };
}

function isFinite32(values) {
  return values.every((value) => Number.isFinite(value));
}

// The answer to a picture, and the state after it, as in the model's facts.
async function infer(pixels, state) {
  engine ??= start();
  let run;
  try {
    run = await engine;
  } catch (error) {
    console.error(error);
    throw new Refused("The browser cannot run the model; try a newer one.", 400);
  }
  const feeds = { x: new run.Tensor("uint8", pixels, [1, ...MODEL.input.shape]) };
  for (const [name, { dtype, shape, data }] of Object.entries(state)) {
    const [kind, Values] = KINDS[dtype];
    feeds[`state.${name}`] = new run.Tensor(kind, new Values(decode(data).buffer), shape);
  }
  const made = await run.session.run(feeds);
  const probabilities = made.probabilities.data;
  if (!isFinite32(probabilities)) throw new Refused("An answer is not finite; the stream is as it was.", 400);
  const after = Object.fromEntries(Object.entries(state).map(([name, leaf]) => {
    const { data } = made[`new.${name}`];
    return [name, { ...leaf, data: encode(new Uint8Array(data.buffer, data.byteOffset, data.byteLength)) }];
  }));
  return { probabilities, weight: MODEL.weighs ? made.weight.data[0] : null, after };
}

// ---- the same ways as those of the service

const kept = "here"; // where the streams are in the session's storage, so that a reload continues them

const recallStreams = () => recall(kept) ?? {};

async function askHere(method, path, { body } = {}) {
  const [what, id, action] = path.split("/").map(decodeURIComponent);
  if (what === "bundles") return { bundles: [MODEL] };
  const streams = recallStreams();
  if (method === "POST" && id === undefined) {
    const made = { id: makeKey(), position: 0, status: null, state: MODEL.state };
    return keep(streams, made);
  }
  const stream = streams[id];
  if (stream === undefined) throw new Refused("there is no such stream.", 404);
  if (method === "DELETE") {
    delete streams[id];
    remember(kept, streams);
    return null;
  }
  if (action === "reset") return keep(streams, { ...stream, position: 0, status: null, state: MODEL.state });
  return action === "predict" ? predict(streams, stream, body.get("image")) : stream;
}

function keep(streams, stream) {
  remember(kept, { ...streams, [stream.id]: stream });
  return stream;
}

async function predict(streams, stream, image) {
  const { probabilities, weight, after } = await infer(await readPicture(image, MODEL.input), stream.state);
  const position = stream.position + 1;
  keep(streams, { ...stream, position, status: "unwatched", state: after });
  const best = probabilities.indexOf(Math.max(...probabilities));
  return {
    label: MODEL.classes[best],
    probability: probabilities[best],
    probabilities: Object.fromEntries(MODEL.classes.map((name, i) => [name, probabilities[i]])),
    weight,
    heads: null,
    why: explain(weight),
    status: "unwatched",
    position,
  };
}

function explain(weight) {
  if (weight === null) return "";
  const side = weight > 0.5 ? "the global head, since the image looks like other clients' data" : "the personal head, since the image looks like this client's own data";
  return `the answer is mostly that of ${side}`;
}
