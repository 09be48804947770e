// The charts of one run: draw() shows what `data` holds in the element `charts`.
let data = null;
const charts = document.getElementById("charts");
const style = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

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
      type: "scatter", mode: "lines", name: "traffic", legend: "legend", x: data.traffic.at, y: data.traffic.rate,
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

function heading(row, text) {
  return {
    xref: "paper", x: 0, xanchor: "left", yref: "paper", y: ROWS[row][1], yanchor: "bottom", yshift: 8,
    text: `<b>${text}</b>`, showarrow: false, font: { size: 13, color: style("ink") },
  };
}

// A scale that one extreme bin does not flatten: the rest stays readable, the extreme is cut and tells its value on hover.
function roof(values, limit) {
  const known = values.filter(v => v !== null).sort((a, b) => a - b);
  if (!known.length) return limit || 1;
  return Math.max(limit ? 1.6 * limit : 0, 1.15 * known[Math.floor(0.97 * (known.length - 1))]);
}

function cut(values, top, unit) {
  return values.some(v => v !== null && v > top) ? `</b>, bars cut at ${top.toPrecision(2)} ${unit}<b>` : "";
}

function layout() {
  const levels = [
    level("y2", data.thresholds.up, "blue", "up " + data.thresholds.up),
    level("y2", data.thresholds.down, "green", "down " + data.thresholds.down),
  ];
  if (data.thresholds.critical !== null) levels.push(level("y2", data.thresholds.critical, "red", "critical"));
  if (data.slo.ttft !== null) levels.push(level("y5", data.slo.ttft, "red", `SLO ${data.slo.ttft} s`));
  if (data.slo.itl !== null) levels.push(level("y6", data.slo.itl * 1000, "red", `SLO ${data.slo.itl * 1000} ms`));
  const events = data.events.map((event, index) => ({
    shape: {
      type: "line", xref: "x", x0: event.at, x1: event.at, yref: "paper", y0: 0, y1: ROWS.replicas[1], layer: "below",
      line: { color: style("muted"), width: 1, dash: "dot" },
    },
    annotation: {
      // one line lower each, so that events close to each other stay readable
      xref: "x", x: event.at, xanchor: "right", yref: "paper", y: ROWS.replicas[1], yanchor: "top", xshift: -5,
      yshift: -15 * (index % 4),
      text: event.text, showarrow: false, font: { size: 11.5, color: style("muted") },
    },
  }));
  const axis = (row, title, extra) => Object.assign({
    domain: ROWS[row], anchor: "x", rangemode: "tozero", gridcolor: style("grid"), zerolinecolor: style("rule"),
    title: { text: title, font: { size: 11.5, color: style("muted") }, standoff: 6 }, fixedrange: true, nticks: 5,
    tickfont: { size: 11, color: style("muted") },
  }, extra);
  const legend = (row, extra) => Object.assign({
    orientation: "h", x: 1, xanchor: "right", y: ROWS[row][1] + 0.006, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)",
    font: { size: 12, color: style("ink") },
  }, extra);
  const milliseconds = data.bins.itl.map(v => v === null ? null : v * 1000);
  const roofs = {
    ttft: roof(data.bins.ttft, data.slo.ttft),
    itl: roof(milliseconds, data.slo.itl === null ? null : data.slo.itl * 1000),
  };
  const most = Math.max(1, ...data.ordered, ...data.demand.filter(v => v !== null));
  return {
    height: 1180, margin: { l: 58, r: 88, t: 8, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, color: style("ink"), size: 12 },
    hovermode: "x unified", hoverdistance: 15, bargap: 0,
    hoverlabel: { bgcolor: style("card"), bordercolor: style("rule"), font: { color: style("ink"), size: 12 }, align: "left", namelength: -1 },
    xaxis: {
      type: "date", anchor: "y6", range: data.span, gridcolor: style("grid"), tickfont: { size: 11, color: style("muted") },
      showspikes: true, spikemode: "across", spikesnap: "cursor", spikethickness: 1, spikecolor: style("muted"),
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
      // on a narrow screen the legend needs the whole line
      ...(charts.clientWidth < 860 ? [] : [heading("replicas", "Replicas and traffic")]), heading("score", "Score and its parts"),
      heading("load", "Queue and KV cache"),
      heading("ttft", `Time to first token, exact p99 of each ${data.bin}` + cut(data.bins.ttft, roofs.ttft, "s")),
      heading("itl", `Time between tokens, exact p99 of each ${data.bin}` + cut(milliseconds, roofs.itl, "ms")),
    ],
  };
}

function draw() {
  Plotly.react(charts, traces(), layout(), { responsive: true, displayModeBar: false });
}

// Show what was around a moment, and scroll to it.
function showAround(at) {
  const around = Math.min(15 * 60 * 1000, (data.span[1] - data.span[0]) / 6);
  Plotly.relayout(charts, { "xaxis.range": [at - around, at + around] });
  charts.scrollIntoView({ behavior: "smooth" });
}
