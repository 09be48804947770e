// The charts of one run: draw() shows what `data` holds in the element `charts`.
let data = null;
const charts = document.getElementById("charts");
const style = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
// The width that an element leaves for a chart: Plotly looks for it only the first time.
function roomIn(element) {
  const { paddingLeft, paddingRight } = getComputedStyle(element);
  return element.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
}

const NARROW = matchMedia("(max-width: 760px)");
// Where a finger moves the page, it must not zoom a chart that fills the screen: nothing could be scrolled any more.
const dragmode = () => matchMedia("(pointer: coarse)").matches ? false : "zoom";

// Rows of the figure, top to bottom: [from, to] of its height.
const ROWS = {
  replicas: [0.735, 0.975], score: [0.515, 0.675], load: [0.325, 0.455], ttft: [0.165, 0.265], itl: [0.0, 0.105],
};

function line(name, y, axis, legend, color, extra) {
  return Object.assign({
    type: "scatter", mode: "lines", name, x: data.at, y, yaxis: axis, legend,
    line: { color: style(color), width: 1.6 }, hovertemplate: "%{y}",
  }, extra);
}

function bars(name, values, axis, limit, unit, digits) {
  const over = limit === null ? values.map(() => false) : values.map(v => v !== null && v > limit);
  return {
    type: "bar", name, x: data.bins.at, y: values, yaxis: axis, width: data.bins.width.map(w => w * 0.92),
    marker: { color: over.map(bad => style(bad ? "red" : "bar")), line: { width: 0 } }, showlegend: false,
    customdata: data.bins.attained, hovertemplate: `%{y:.${digits}f} ${unit}<br>%{customdata}`,
  };
}

function traces() {
  const steps = { shape: "hv" };
  const part = color => ({ line: { color: style(color), width: 1 }, opacity: 0.65, hovertemplate: "%{y:.2f}" });
  const pick = (up, down) => data.actions.map(action => action.up ? up : down);
  return [
    {
      type: "scatter", mode: "lines", name: NARROW.matches ? "requests/s" : "traffic", legend: "legend", x: data.traffic.at, y: data.traffic.rate,
      yaxis: "y7", fill: "tozeroy", fillcolor: style("traffic"), line: { color: style("traffic-line"), width: 0.8 },
      hovertemplate: "%{y:.1f} requests/s",
    },
    line("ready", data.ready, "y", "legend", "blue", {
      line: { color: style("blue"), width: 0, ...steps }, fill: "tozeroy", fillcolor: style("blue-soft"),
    }),
    line("ordered", data.ordered, "y", "legend", "blue", { line: { color: style("blue"), width: 1.8, ...steps } }),
    line("demand", data.demand, "y", "legend", "amber", { hovertemplate: "%{y:.2f}" }),
    line("forecast", data.forecast, "y", "legend", "amber", {
      line: { color: style("amber"), width: 1, dash: "dot" }, hovertemplate: "%{y:.2f}",
    }),
    {
      type: "scatter", mode: "markers", name: "action", legend: "legend", yaxis: "y",
      x: data.actions.map(r => r.at), y: data.actions.map(r => r.to), customdata: data.actions.map(r => r.text),
      hovertemplate: "%{customdata}<extra></extra>",
      marker: {
        symbol: pick("triangle-up", "triangle-down"), size: 10, color: pick(style("blue"), style("green")),
        line: { width: 1, color: style("card") },
      },
    },
    line("memory", data.memory, "y2", "legend2", "violet", part("violet")),
    line("backlog", data.backlog, "y2", "legend2", "red", part("red")),
    line("latency", data.latency, "y2", "legend2", "teal", part("teal")),
    line("score", data.score, "y2", "legend2", "ink", { hovertemplate: "%{y:.2f}" }),
    line("waiting requests", data.waiting, "y3", "legend3", "red", { line: { color: style("red"), width: 1.4 } }),
    line("KV cache in use", data.kv_usage, "y4", "legend3", "violet", { hovertemplate: "%{y:.0%}" }),
    bars("TTFT p99", data.bins.ttft, "y5", data.slo.ttft, "s", 2),
    bars("ITL p99", data.bins.itl.map(v => v === null ? null : v * 1000), "y6", data.slo.itl === null ? null : data.slo.itl * 1000, "ms", 0),
  ];
}

function level(axis, y, color, text) {
  return {
    shape: {
      type: "line", xref: "paper", x0: 0, x1: 1, yref: axis, y0: y, y1: y, layer: "above",
      line: { color: style(color), width: 1, dash: "dash" },
    },
    annotation: {
      xref: "paper", x: 1, xanchor: "left", yref: axis, y, yanchor: "middle", showarrow: false, xshift: 4,
      text, font: { size: 11, color: style(color) },
    },
  };
}

// On a narrow screen the lines of the legend lie between the heading and its chart.
function heading(row, text, lines = 0) {
  const narrow = NARROW.matches ? { xshift: -42, yshift: 8 + 19 * lines } : { yshift: 8 };
  return {
    xref: "paper", x: 0, xanchor: "left", yref: "paper", y: ROWS[row][1], yanchor: "bottom",
    text: `<b>${text}</b>`, showarrow: false, font: { size: 13, color: style("ink") }, ...narrow,
  };
}

// What an event says, on the side of its line that has room; in short lines where the screen is narrow.
function eventText(event, index) {
  const left = event.at - data.span[0] > data.span[1] - event.at;
  const words = NARROW.matches ? event.text.replace(/(.{12,20}) /g, "$1<br>") : event.text;
  return {
    // one line lower each, so that events close to each other stay readable
    xref: "x", x: event.at, xanchor: left ? "right" : "left", yref: "paper", y: ROWS.replicas[1], yanchor: "top",
    xshift: left ? -5 : 5, yshift: -15 * (index % 4), align: left ? "right" : "left",
    text: words, showarrow: false, font: { size: 11.5, color: style("muted") },
  };
}

// A scale that one extreme bin does not flatten: the rest stays readable, the extreme is cut and tells its value on hover.
function roof(values, limit) {
  const known = values.filter(v => v !== null).sort((a, b) => a - b);
  if (!known.length) return limit || 1;
  return Math.max(limit ? 1.6 * limit : 0, 1.15 * known[Math.floor(0.97 * (known.length - 1))]);
}

function cut(values, top, unit) {
  return values.some(v => v !== null && v > top) ? `</b>, bars cut at ${Number(top.toPrecision(2))} ${unit}<b>` : "";
}

const slo = value => NARROW.matches ? "SLO" : `SLO ${value}`;

function layout() {
  const levels = [
    level("y2", data.thresholds.up, "blue", "up " + data.thresholds.up),
    level("y2", data.thresholds.down, "green", "down " + data.thresholds.down),
  ];
  if (data.thresholds.critical !== null) levels.push(level("y2", data.thresholds.critical, "red", "critical"));
  if (data.slo.ttft !== null) levels.push(level("y5", data.slo.ttft, "ink", slo(`${data.slo.ttft} s`)));
  if (data.slo.itl !== null) levels.push(level("y6", data.slo.itl * 1000, "ink", slo(`${data.slo.itl * 1000} ms`)));
  const events = data.events.map((event, index) => ({
    shape: {
      type: "line", xref: "x", x0: event.at, x1: event.at, yref: "paper", y0: 0, y1: ROWS.replicas[1], layer: "below",
      line: { color: style("muted"), width: 1, dash: "dot" },
    },
    annotation: eventText(event, index),
  }));
  const axis = (row, title, extra) => Object.assign({
    domain: ROWS[row], anchor: "x", rangemode: "tozero", gridcolor: style("grid"), zerolinecolor: style("rule"),
    title: { text: NARROW.matches ? "" : title, font: { size: 11.5, color: style("muted") }, standoff: 6 },
    fixedrange: true, nticks: 5, tickfont: { size: 11, color: style("muted") },
  }, extra);
  const legend = (row, extra) => Object.assign({
    orientation: "h", x: 1, xanchor: "right", y: ROWS[row][1] + 0.006, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)",
    font: { size: NARROW.matches ? 11 : 12, color: style("ink") },
  }, extra);
  const milliseconds = data.bins.itl.map(v => v === null ? null : v * 1000);
  const roofs = {
    ttft: roof(data.bins.ttft, data.slo.ttft),
    itl: roof(milliseconds, data.slo.itl === null ? null : data.slo.itl * 1000),
  };
  const most = Math.max(1, ...data.ordered, ...data.demand.filter(v => v !== null));
  const each = NARROW.matches ? "p99" : `exact p99 of each ${data.bin}`;
  return {
    ...(NARROW.matches ? { height: 1480, margin: { l: 46, r: 64, t: 70, b: 38 } } : { height: 1180, margin: { l: 58, r: 88, t: 8, b: 38 } }),
    width: roomIn(charts), dragmode: dragmode(),
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, color: style("ink"), size: 12 },
    hovermode: "x unified", hoverdistance: 15, bargap: 0,
    hoverlabel: { bgcolor: style("card"), bordercolor: style("rule"), font: { color: style("ink"), size: 12 }, align: "left", namelength: -1 },
    xaxis: {
      type: "date", anchor: "y6", range: data.span, gridcolor: style("grid"), tickfont: { size: 11, color: style("muted") },
      tickangle: 0, ticks: "outside", ticklen: 5, tickcolor: "rgba(0,0,0,0)", showspikes: true, spikemode: "across", spikesnap: "cursor", spikethickness: 1, spikecolor: style("muted"),
      spikedash: "solid", hoverformat: "%a %H:%M:%S", zeroline: false,
    },
    yaxis: axis("replicas", "replicas", { range: [0, most * 1.12], overlaying: "y7", dtick: most > 12 ? undefined : 2 }),
    yaxis2: axis("score", "0 to 1", { range: [0, 1.04], nticks: 6 }),
    yaxis3: axis("load", "waiting"),
    yaxis4: axis("load", "KV cache", { overlaying: "y3", side: "right", range: [0, 1.02], tickformat: ".0%", dtick: 0.25, showgrid: false }),
    yaxis5: axis("ttft", "seconds", { range: [0, roofs.ttft] }),
    yaxis6: axis("itl", "milliseconds", { range: [0, roofs.itl] }),
    yaxis7: axis("replicas", "requests/s", { side: "right", showgrid: false, range: [0, 1.12 * Math.max(1, ...data.traffic.rate)] }),
    legend: legend("replicas", { traceorder: "normal" }), legend2: legend("score"), legend3: legend("load"),
    shapes: [...levels, ...events].map(item => item.shape),
    annotations: [
      ...[...levels, ...events].map(item => item.annotation),
      heading("replicas", "Replicas and traffic", 3), heading("score", "Score and its parts", 2),
      heading("load", "Queue and KV cache", 2),
      heading("ttft", `Time to first token, ${each}` + cut(data.bins.ttft, roofs.ttft, "s")),
      heading("itl", `Time between tokens, ${each}` + cut(milliseconds, roofs.itl, "ms")),
    ],
  };
}

function draw() {
  Plotly.react(charts, traces(), layout(), { displayModeBar: false });
  everything.hidden = true;
}

// A way back from a part of the time to all of it, which needs no double-click: a finger has none here.
const everything = document.createElement("button");
everything.className = "everything";
everything.textContent = "Show everything";
everything.addEventListener("click", () => Plotly.relayout(charts, { "xaxis.range": data.span }));
document.body.append(everything);

const moment = value => typeof value === "number" ? value : Date.parse(value.length > 10 ? value.replace(" ", "T") + "Z" : value);

// Offer the way back wherever not all is shown; Plotly tells of each change once it knows the charts.
function offerEverything() {
  charts.on("plotly_relayout", () => {
    const range = charts.layout.xaxis.range.map(moment);
    everything.hidden = range[0] <= data.span[0] && range[1] >= data.span[1];
  });
}

// Show what was around a moment, and scroll to it.
function showAround(at) {
  const around = Math.min(15 * 60 * 1000, (data.span[1] - data.span[0]) / 6);
  Plotly.relayout(charts, { "xaxis.range": [at - around, at + around] });
  charts.scrollIntoView({ behavior: "smooth" });
}

// Draw anew whenever the page looks otherwise: other colours, or another width. A phone changes its height as it scrolls.
function drawAnew(draw) {
  const wide = () => document.documentElement.clientWidth;  // innerWidth grows with what juts out
  let width = wide(), waiting = 0;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", () => {
    if (wide() === width) return;
    width = wide();
    clearTimeout(waiting);
    waiting = setTimeout(draw, 150);
  });
}
