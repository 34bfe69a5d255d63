"use strict";
// Asks once a second and draws what came. Texts go in as text alone, never as markup.

const PERIOD_MS = 1000;
const SAMPLES_MAX = 120;
const SVG = "http://www.w3.org/2000/svg";
const samples = []; // {at, rate, hits, requests} of the last two minutes
let before = null; // the counters of the answer before

const byId = (id) => document.getElementById(id);

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${count.toFixed(count >= 100 || unit === 0 ? 0 : 1)} ${units[unit]}`;
}

function seconds(value) {
  return value < 1 ? `${(value * 1000).toFixed(1)} ms` : `${value.toFixed(2)} s`;
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function drawLine(id, values, least) {
  const svg = byId(id);
  const top = Math.max(least, ...values.filter((value) => value !== null));
  svg.setAttribute("viewBox", `0 0 ${SAMPLES_MAX} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  let path = "";
  values.forEach((value, index) => {
    if (value === null) return;
    const x = SAMPLES_MAX - values.length + index;
    path += `${path ? "L" : "M"}${x} ${(97 - (94 * value) / top).toFixed(1)}`;
  });
  svg.replaceChildren(shape("path", { d: path }));
}

function difference(now, key) {
  return Math.max(0, now[key] - before[key]);
}

function takeSample(now) {
  const sample = { rate: now.schedule.rate_bytes_per_s, hits: null, requests: null };
  if (before !== null && now.at_unix_s > before.at_unix_s) {
    const asked = difference(now, "matched_chunks") + difference(now, "missed_chunks");
    sample.hits = asked ? difference(now, "matched_chunks") / asked : null;
    sample.requests = difference(now, "requests") / (now.at_unix_s - before.at_unix_s);
  }
  before = now;
  samples.push(sample);
  if (samples.length > SAMPLES_MAX) samples.shift();
  return sample;
}

function drawTiles(now, sample) {
  const asked = now.matched_chunks + now.missed_chunks;
  byId("rate").textContent = `${bytes(now.schedule.rate_bytes_per_s)}/s`;
  byId("hits").textContent = asked ? `${((100 * now.matched_chunks) / asked).toFixed(1)} %` : "no match yet";
  byId("requests").textContent = sample.requests === null ? "-" : `${sample.requests.toFixed(0)}/s`;
  byId("stored").textContent = bytes(now.stored_bytes);
  byId("capacity").textContent = now.capacity_bytes ? `of ${bytes(now.capacity_bytes)}` : "";
  drawLine("rate-line", samples.map((each) => each.rate), 1);
  drawLine("hits-line", samples.map((each) => each.hits), 1);
  drawLine("requests-line", samples.map((each) => each.requests), 1);
}

function drawAllocation(schedule) {
  const { policy, cap_gbps: cap } = schedule.configuration;
  const running = schedule.deliveries;
  byId("policy").textContent = `${policy}, ${cap ? `${cap} Gbps` : "no cap"}, ` +
    `${schedule.delivery_count} running, ${schedule.waiting} waiting`;
  const rateOf = (each) => each.rate_bytes_per_s ?? (each.age_s > 0 ? each.sent_bytes / each.age_s : 0);
  const top = Math.max(cap ? (cap * 1e9) / 8 : 0, 1, ...running.map(rateOf));
  const rows = running.slice(0, 20).map((each) => {
    const row = element("div", "row");
    row.append(element("span", "name", `${each.tenant} ${each.request_id}`));
    const track = element("div", "track");
    const bar = element("div");
    bar.style.width = `${(100 * rateOf(each)) / top}%`;
    track.append(bar);
    const given = each.rate_bytes_per_s === null ? "so far" : "given";
    row.append(track, element("span", "figure", `${bytes(rateOf(each))}/s ${given}`));
    return row;
  });
  byId("allocation").replaceChildren(
    ...(rows.length ? rows : [element("p", "empty", "No delivery is running.")]));
}

// A layer arrives from its first read until it is ready. The GPU computes on it from the moment that
// it is ready and the layer before is through, until it is consumed; before that the GPU waits.
function drawTimeline(trace) {
  const layers = trace.layers.filter((layer) => layer.ready_s !== null || layer.first_read_s !== null);
  const ends = layers.flatMap((layer) => [layer.ready_s, layer.consumed_s]).filter((at) => at !== null);
  const span = Math.max(trace.duration_s ?? 0, 1e-6, ...ends);
  const svg = shape("svg", { class: "timeline", viewBox: "0 0 1000 30", preserveAspectRatio: "none", role: "img" });
  svg.setAttribute("aria-label", `${layers.length} layers in ${seconds(span)}`);
  const bar = (kind, from, to, y, height) => {
    if (from === null || to === null || to < from) return;
    const x = (1000 * from) / span;
    const width = Math.max(0.8, (1000 * (to - from)) / span);
    svg.append(shape("rect", { class: kind, x, y, width, height }));
  };
  let through = null;
  for (const layer of layers) {
    bar("arriving", layer.first_read_s, layer.ready_s, 2, 11);
    if (layer.consumed_s === null || layer.ready_s === null) continue;
    if (through !== null && layer.ready_s > through) bar("waiting", through, layer.ready_s, 16, 11);
    bar("computing", Math.max(layer.ready_s, through ?? layer.ready_s), layer.consumed_s, 16, 11);
    through = layer.consumed_s;
  }
  return svg;
}

function drawDeliveries(traces) {
  const rows = traces.map((trace) => {
    const row = element("div", "row");
    const name = element("span", "name", `${trace.tenant} ${trace.bucket} ${trace.request_id}`);
    name.title = name.textContent;
    const words = trace.error ? trace.error.code : trace.duration_s === null ? "running" : seconds(trace.duration_s);
    const decoded = trace.decoded_bytes > trace.payload_bytes ? ` for ${bytes(trace.decoded_bytes)}` : "";
    const figure = element("span", trace.error ? "figure failed" : "figure",
      `${trace.delivery || trace.path} ${bytes(trace.payload_bytes)}${decoded}, ${words}`);
    row.append(name, drawTimeline(trace), figure);
    return row;
  });
  byId("deliveries").replaceChildren(
    ...(rows.length ? rows : [element("p", "empty", "No delivery has run yet.")]));
}

function say(text, isBad) {
  const state = byId("state");
  state.textContent = text;
  state.className = isBad ? "bad" : "";
}

async function refresh() {
  try {
    // The origin leaves out credentials that the page's own address may hold, which fetch refuses.
    const answer = await fetch(new URL("/status/data", location.origin), { cache: "no-store" });
    if (!answer.ok) throw new Error(`the admin API answers ${answer.status}`);
    const now = await answer.json();
    const sample = takeSample(now);
    drawTiles(now, sample);
    drawAllocation(now.schedule);
    drawDeliveries(now.traces);
    say(now.draining ? "draining" : `serving, engine ${now.engine}`, now.draining);
  } catch (error) {
    say(`no news: ${error.message}`, true);
  }
  setTimeout(refresh, PERIOD_MS);
}

refresh();
