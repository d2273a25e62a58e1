// From an image file to pixels as the model was trained on, with the arithmetic of Pillow, as `fedthe predict` does.

const MOST_PIXELS = 64_000_000;

async function readPicture(blob, { shape: [height, width, channels], square }) {
  let image;
  try {
    image = await createImageBitmap(blob, { colorSpaceConversion: "none" }); // upright, as its EXIF data says
  } catch {
    throw new Refused("This is not an image that the browser can read.", 400);
  }
  if (image.width * image.height > MOST_PIXELS) throw new Refused("The image has too many pixels.", 400);
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white"; // behind whatever is transparent
  context.fillRect(0, 0, image.width, image.height);
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  return fit(takeChannels(data, channels), image.width, image.height, { height, width, channels, square });
}

function takeChannels(rgba, channels) {
  const pixels = new Uint8Array((rgba.length / 4) * channels);
  for (let from = 0, to = 0; from < rgba.length; from += 4) {
    const [r, g, b] = [rgba[from], rgba[from + 1], rgba[from + 2]];
    if (channels === 1) pixels[to++] = (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16;
    else [pixels[to++], pixels[to++], pixels[to++]] = [r, g, b];
  }
  return pixels;
}

function fit(pixels, across, down, { height, width, channels, square }) {
  const picture = { pixels, width: across, height: down, channels };
  if (square === null && across * height !== down * width) {
    throw new Refused(`The image is ${across} × ${down} pixels; the model takes others of the shape ${width} × ${height}.`, 400);
  }
  const scale = (square === "pad" ? Math.max : Math.min)(across / width, down / height);
  if (square === "pad") {
    const inside = [Math.max(1, roundHalfEven(across / scale)), Math.max(1, roundHalfEven(down / scale))];
    return pad(resize(picture, ...inside, [0, 0, across, down]), width, height);
  }
  const [wide, tall] = square === "stretch" ? [across, down] : [width * scale, height * scale];
  const [left, top] = [(across - wide) / 2, (down - tall) / 2];
  return resize(picture, width, height, [left, top, left + wide, top + tall]).pixels;
}

// As Python rounds.
function roundHalfEven(value) {
  const below = Math.floor(value);
  if (value - below !== 0.5) return Math.round(value);
  return below % 2 ? below + 1 : below;
}

function pad({ pixels, width, height, channels }, wide, tall) {
  const made = new Uint8Array(wide * tall * channels);
  const left = Math.floor((wide - width) / 2), top = Math.floor((tall - height) / 2);
  for (let y = 0; y < height; y++) {
    made.set(pixels.subarray(y * width * channels, (y + 1) * width * channels), ((y + top) * wide + left) * channels);
  }
  return made;
}

// Bilinear with a support that grows as the picture shrinks; first across, then down, with 8 bits in between. From
// version 13 on, Pillow goes down first where a picture shrinks far more that way: then a pixel may differ by 1.
function resize(picture, width, height, [left, top, right, bottom]) {
  const whole = (size, from, to, before) => size === before && from === 0 && to === before;
  let made = picture;
  if (!whole(width, left, right, made.width)) made = resizeAcross(made, weigh(made.width, left, right, width));
  if (!whole(height, top, bottom, made.height)) made = turn(resizeAcross(turn(made), weigh(made.height, top, bottom, height)));
  return made;
}

const BITS = 22; // of a weight: Pillow has 32 for a sum, less 8 for a pixel and 2 for room

// For each pixel that is made: the first one that counts, and the weights of it and those that follow.
function weigh(before, from, to, after) {
  const scale = Math.fround(Math.fround(to) - Math.fround(from)) / after;
  const support = Math.max(1, scale);
  return Array.from({ length: after }, (_, i) => {
    const centre = Math.fround(from) + (i + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - support + 0.5));
    const last = Math.min(before, Math.trunc(centre + support + 0.5));
    const shares = Array.from({ length: last - first }, (_, j) => Math.max(0, 1 - Math.abs((j + first - centre + 0.5) / support)));
    const sum = shares.reduce((total, share) => total + share, 0);
    return { first, weights: shares.map((share) => Math.trunc(0.5 + (share / sum) * 2 ** BITS)) };
  });
}

function resizeAcross({ pixels, width, height, channels }, made) {
  const out = new Uint8Array(made.length * height * channels);
  for (let y = 0, to = 0; y < height; y++) {
    for (const { first, weights } of made) {
      for (let c = 0; c < channels; c++) {
        let sum = 2 ** (BITS - 1);
        for (let j = 0, at = (y * width + first) * channels + c; j < weights.length; j++, at += channels) sum += weights[j] * pixels[at];
        out[to++] = Math.min(255, sum / 2 ** BITS);
      }
    }
  }
  return { pixels: out, width: made.length, height, channels };
}

function turn({ pixels, width, height, channels }) {
  const out = new Uint8Array(pixels.length);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      for (let c = 0; c < channels; c++) out[(x * height + y) * channels + c] = pixels[(y * width + x) * channels + c];
    }
  }
  return { pixels: out, width: height, height: width, channels };
}
