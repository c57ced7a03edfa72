"use strict";
// Everything of a job is put in as text or as a number, never as markup.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const PARTS = ["forward", "backward", "optimizer", "wait", "bubble", "data", "other"];
  const NAMES = { wait: "waiting for ranks", data: "waiting for data", bubble: "pipeline bubble" };
  let colourBy = "step_s";
  let chosen = null;
  let last = null;
  let map = null;

  const byId = (id) => document.getElementById(id);
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  function el(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return made;
  }
  function svg(name, attributes, ...children) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  const put = (id, ...children) => byId(id).replaceChildren(...children);
  function count(value) { return isNumber(value) ? Math.round(value).toLocaleString("en") : "–"; }
  function short(value) {
    if (!isNumber(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  }
  function seconds(value) {
    if (!isNumber(value)) return "–";
    if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
    if (value < 1) return `${(value * 1e3).toFixed(1)} ms`;
    if (value < 120) return `${value.toFixed(1)} s`;
    return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
  }
  function bytes(value) {
    if (!isNumber(value)) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let index = 0;
    while (value >= 1024 && index < units.length - 1) { value /= 1024; index += 1; }
    return `${value.toFixed(index ? 1 : 0)} ${units[index]}`;
  }
  const percent = (value) => (isNumber(value) ? `${(value * 100).toFixed(0)} %` : "–");
  const clock = (time) => (isNumber(time) ? new Date(time * 1000).toLocaleTimeString() : "");

  function table(id, columns, rows, empty) {
    if (!rows.length) { put(id, el("p", { class: "dim" }, empty)); return; }
    const head = el("tr", {}, ...columns.map(([title, , isFigure]) => el("th", { scope: "col", class: isFigure ? "number" : "" }, title)));
    const body = rows.map((row) => el("tr", {}, ...columns.map(([, cell, isFigure]) => el("td", { class: isFigure ? "number" : "" }, cell(row)))));
    put(id, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
  }

  const pointsOf = (xs, ys) => xs.map((x, index) => [x, ys[index]]).filter(([x, y]) => isNumber(x) && isNumber(y));
  function lineChart(id, xs, ys, label, show, dots = [], dotLabel = "") {
    const points = pointsOf(xs, ys);
    if (points.length < 2) { put(id, el("p", { class: "dim" }, "not measured yet")); return; }
    const [width, height, left, bottom, top] = [560, 200, 58, 22, 10];
    const lowX = points[0][0], highX = points[points.length - 1][0];
    const shownDots = dots.filter(([at]) => at >= lowX && at <= highX), heights = [...points, ...shownDots].map((point) => point[1]);
    let lowY = Math.min(...heights), highY = Math.max(...heights);
    if (lowY === highY) { lowY -= Math.abs(lowY) / 10 || 1; highY += Math.abs(highY) / 10 || 1; }
    const x = (value) => left + ((value - lowX) / (highX - lowX || 1)) * (width - left - 8);
    const y = (value) => top + (1 - (value - lowY) / (highY - lowY)) * (height - top - bottom);
    const marks = [0, 0.5, 1].flatMap((share) => {
      const value = lowY + share * (highY - lowY);
      return [svg("line", { class: "axis", x1: left, x2: width - 8, y1: y(value), y2: y(value) }), textAt(left - 6, y(value) + 4, show(value), "end")];
    });
    const steps = [lowX, Math.round((lowX + highX) / 2), highX].map((value, index) => textAt(x(value), height - 6, `step ${count(value)}`, ["start", "middle", "end"][index]));
    const path = points.map(([a, b], index) => `${index ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    const newest = points[points.length - 1];
    put(id, svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${label}, ${points.length} points, now ${show(newest[1])} at step ${newest[0]}`, "data-points": points.length },
      ...marks, ...steps, svg("path", { class: "curve", d: path }), ...shownDots.map(([a, b]) => {
        const title = svg("title", {});
        title.textContent = `${dotLabel} ${show(b)} at step ${a}`;
        return svg("circle", { class: "dot", cx: x(a), cy: y(b), r: 3.5, "data-dot": a }, title);
      })));
  }
  function textAt(x, y, text, anchor) {
    const made = svg("text", { x, y, "text-anchor": anchor || "start" });
    made.textContent = text;
    return made;
  }

  function heat(share) {
    // From calm to hot, readable in both schemes.
    return `hsl(${(210 - 190 * share).toFixed(0)} 65% ${(58 - 8 * share).toFixed(0)}%)`;
  }
  function nameAt(x, y, text) {
    const made = textAt(x, y, text, "middle");
    made.setAttribute("pointer-events", "none");
    made.classList.add("on");
    return made;
  }
  function newMap(ranks) {
    const columns = Math.min(ranks.length, Math.max(8, Math.ceil(Math.sqrt(ranks.length * 4))));
    const size = ranks.length > 200 ? 18 : 44;
    const cells = ranks.map((rank, index) => {
      const x = (index % columns) * size, y = Math.floor(index / columns) * size;
      const title = svg("title", {});
      const cell = svg("rect", { x, y, width: size - 2, height: size - 2, rx: 3, tabindex: 0, role: "button", "data-rank": rank.rank }, title);
      return { cell, title, name: nameAt(x + (size - 2) / 2, y + size / 2 + 3, "") };
    });
    const width = columns * size, hasNames = size > 30;
    const groups = cells.map(({ cell, name }) => svg("g", {}, cell, ...(hasNames ? [name] : [])));
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${Math.ceil(ranks.length / columns) * size}`, role: "group" }, ...groups);
    drawing.style.maxWidth = `${Math.max(width, 120)}px`;
    const caption = el("p", { class: "dim" });
    const focused = document.activeElement && document.activeElement.getAttribute("data-rank");
    put("ranks", drawing, caption);
    const again = focused === null || focused === undefined ? null : drawing.querySelector(`[data-rank="${Number(focused)}"]`);
    if (again) again.focus();
    return { ranks: ranks.map((rank) => rank.rank).join(), cells, drawing, caption };
  }
  function change(element, name, value) { if (element.getAttribute(name) !== value) element.setAttribute(name, value); }
  function changeText(element, text) { if (element.textContent !== text) element.textContent = text; }
  function drawRanks(state) {
    const ranks = state.ranks;
    if (!ranks.length) { map = null; put("ranks", el("p", { class: "dim" }, "no rank has reported yet")); return; }
    // Its cells stay as long as the ranks do: of a thousand, most look as they did a second ago.
    if (!map || map.ranks !== ranks.map((rank) => rank.rank).join()) map = newMap(ranks);
    const known = ranks.map((rank) => rank[colourBy]).filter(isNumber);
    const low = Math.min(...known), high = Math.max(...known);
    const show = colourBy === "memory" ? bytes : colourBy === "wait_share" ? percent : seconds;
    const slow = new Set(state.stragglers.map((one) => one.rank));
    ranks.forEach((rank, index) => {
      const value = rank[colourBy], { cell, title, name } = map.cells[index];
      // Small differences are no news: the scale spans at least a fifth of the largest value.
      const share = isNumber(value) ? (value - low) / Math.max(high - low, Math.abs(high) / 5, 1e-12) : 0;
      const label = `rank ${rank.rank}: ${show(value)}${slow.has(rank.rank) ? ", slower than the others" : ""}${rank.is_silent ? `, silent for ${seconds(rank.silent_s)}` : ""}`;
      change(cell, "class", `cell${chosen === rank.rank ? " chosen" : ""}`);
      change(cell, "fill", isNumber(value) && !rank.is_silent ? heat(share) : "#9aa4af");
      change(cell, "aria-label", label);
      changeText(title, label);
      changeText(name, `${rank.rank}${slow.has(rank.rank) ? " ⚠" : ""}`);
    });
    change(map.drawing, "aria-label", `${ranks.length} ranks by ${colourBy}`);
    changeText(map.caption, known.length ? `${show(low)} to ${show(high)}` : "not measured");
  }
  function drawRank(state) {
    const rank = state.ranks.find((one) => one.rank === chosen);
    if (!rank) { put("rank"); return; }
    const facts = [["node", rank.node ?? "–"], ["process", rank.pid ?? "–"], ["step", count(rank.step)], ["step time", seconds(rank.step_s)], ["busy", seconds(rank.busy_s)],
      ["waiting for ranks", percent(rank.wait_share)], ["waiting for data", percent(rank.data_share)], ["memory", bytes(rank.memory)], ["device memory", bytes(rank.device_memory)], ["fragmented", percent(rank.fragmentation)],
      ["cores", short(rank.cores)], ["operations", isNumber(rank.flops) ? `${short(rank.flops / 1e9)} GFLOP/s` : "–"], ["MFU", percent(rank.mfu)], ["heard of", `${seconds(rank.silent_s)} ago`]];
    const rows = facts.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)));
    put("rank", el("h3", {}, `Rank ${rank.rank}`), el("table", {}, el("tbody", {}, ...rows)), partsBar(rank.parts));
  }

  function partsBar(parts) {
    const total = PARTS.reduce((sum, part) => sum + (parts[part] || 0), 0);
    if (!total) return el("p", { class: "dim" }, "not measured yet");
    let x = 0;
    const bars = [], legend = [];
    for (const part of PARTS) {
      const value = parts[part];
      if (!isNumber(value)) continue;
      const width = (value / total) * 560;
      const label = `${NAMES[part] || part}: ${seconds(value)}, ${percent(value / total)}`;
      const title = svg("title", {});
      title.textContent = label;
      bars.push(svg("rect", { class: `p-${part}`, x, y: 0, width, height: 28, "data-part": part, "data-seconds": value }, title));
      legend.push(el("span", {}, svg("svg", { viewBox: "0 0 8 8", "aria-hidden": "true" }, svg("rect", { class: `p-${part}`, width: 8, height: 8 })), label));
      x += width;
    }
    return el("div", {}, svg("svg", { viewBox: "0 0 560 28", role: "img", "aria-label": "parts of a step" }, ...bars), el("div", { class: "legend" }, ...legend));
  }

  function drawTimeline(rows) {
    const spans = rows.flatMap((row) => row.spans);
    if (!spans.length) { put("timeline", el("p", { class: "dim" }, "not measured yet")); return; }
    const end = Math.max(...spans.map(([, start, took]) => start + took)) || 1;
    const [width, left, height] = [1100, 60, 26];
    const drawn = rows.flatMap((row, index) => {
      const y = index * height;
      // Long spans first, so what is inside them stays visible.
      const ordered = [...row.spans].sort((one, other) => other[2] - one[2]);
      return [textAt(left - 8, y + 16, `rank ${row.rank}`, "end"), ...ordered.map(([name, start, took]) => {
        const kind = name.startsWith("wait") ? "wait" : name;
        const title = svg("title", {});
        title.textContent = `${name}: ${seconds(took)}`;
        const inset = kind === "wait" ? 5 : 0;
        return svg("rect", { class: `p-${PARTS.includes(kind) || kind === "stage" || kind === "schedule" ? kind : "other"}`, x: left + (start / end) * (width - left - 4), y: y + 3 + inset,
          width: Math.max(1, (took / end) * (width - left - 4)), height: height - 6 - 2 * inset, rx: 2 }, title);
      })];
    });
    put("timeline", svg("svg", { viewBox: `0 0 ${width} ${rows.length * height + 20}`, role: "img", "aria-label": `the last step of ${rows.length} ranks, ${seconds(end)}` },
      ...drawn, textAt(left, rows.length * height + 14, "0"), textAt(width - 4, rows.length * height + 14, seconds(end), "end")));
  }

  function drawMesh(mesh, worldSize) {
    byId("mesh-section").hidden = !mesh;
    if (!mesh) return;
    const axes = Object.entries(mesh).filter(([, degree]) => degree > 1);
    const text = Object.entries(mesh).map(([axis, degree]) => `${axis} ${degree}`).join(" × ");
    const across = axes.length ? axes[axes.length - 1][1] : 1;
    const shown = Math.min(worldSize, 256);
    const cells = Array.from({ length: shown }, (_, rank) => {
      const x = (rank % across) * 34, y = Math.floor(rank / across) * 24;
      const title = svg("title", {});
      let rest = rank;
      const place = [...axes].reverse().map(([axis, degree]) => { const at = rest % degree; rest = Math.floor(rest / degree); return `${axis} ${at}`; }).reverse();
      title.textContent = `rank ${rank}: ${place.join(", ")}`;
      return svg("g", {}, svg("rect", { x, y, width: 32, height: 22, rx: 3, fill: heat(axes.length > 1 ? (Math.floor(rank / across) % 8) / 8 : 0) }, title), nameAt(x + 16, y + 15, String(rank)));
    });
    const drawing = svg("svg", { viewBox: `0 0 ${across * 34} ${Math.ceil(shown / across) * 24}`, role: "img", "aria-label": text }, ...cells);
    drawing.style.maxWidth = `${across * 34}px`;
    put("mesh", el("p", {}, `${text} = ${worldSize} ranks`), drawing);
    drawPipeline(mesh, axes, shown);
  }
  function drawPipeline(mesh, axes, shown) {
    const stages = mesh.pp > 1 ? mesh.pp : 0;
    if (!stages) { put("pipeline"); return; }
    const after = axes.slice(axes.findIndex(([axis]) => axis === "pp") + 1).reduce((product, [, degree]) => product * degree, 1);
    const width = 96;
    const boxes = Array.from({ length: stages }, (_, stage) => {
      const ranks = Array.from({ length: shown }, (_, rank) => rank).filter((rank) => Math.floor(rank / after) % stages === stage);
      const x = stage * (width + 24);
      const named = ranks.length > 6 ? `${ranks.slice(0, 5).join(", ")}, …` : ranks.join(", ");
      const arrow = stage + 1 < stages ? [textAt(x + width + 12, 26, "→", "middle")] : [];
      return svg("g", { "data-stage": stage }, svg("rect", { class: "stage", x, y: 2, width, height: 40, rx: 5 }), textAt(x + width / 2, 18, `stage ${stage}`, "middle"), textAt(x + width / 2, 34, `rank ${named}`, "middle"), ...arrow);
    });
    const drawing = svg("svg", { viewBox: `0 0 ${stages * (width + 24) - 22} 44`, role: "img", "aria-label": `a pipeline of ${stages} stages` }, ...boxes);
    drawing.style.maxWidth = `${stages * (width + 24)}px`;
    put("pipeline", drawing);
  }

  function drawAdvice(state) {
    const held = state.bottlenecks || [], advice = state.recommendations || [];
    byId("advice-section").hidden = !held.length && !advice.length;
    put("bottlenecks", ...held.map((one) => el("p", { class: { critical: "bad", high: "warn" }[one.severity] || "" }, `${one.kind}: ${percent(one.share)} of a step – ${one.evidence} (confidence ${short(one.confidence)})`)));
    put("recommendations", ...advice.map((one) => {
      const item = el("li", {}, el("b", {}, one.title), `: ${isNumber(one.gain_s) ? `${one.is_bound ? "up to " : ""}${seconds(one.gain_s)} a step` : "gain to be measured"} – ${one.reckoning}`);
      if (one.plan_change) item.append(el("pre", {}, one.plan_change));
      if (one.caution) item.append(el("p", { class: "dim" }, one.caution));
      return item;
    }));
    const waits = state.waits || [];
    byId("waits-section").hidden = !waits.length;
    table("waits", [["rank", (row) => row.rank], ["waits a step", (row) => seconds(row.waits_s), true], ["others wait for it", (row) => seconds(row.delays_s), true], ["comes last in", (row) => percent(row.last_share), true]], waits, "none");
  }
  function drawCourse(course, risks) {
    const rows = [];
    const { convergence, stability, efficiency } = course || {};
    if (convergence) rows.push(["convergence", `${convergence.trend}, ${short(convergence.change_per_1000_steps)} ± ${short(convergence.error)} in 1,000 steps; best ${short(convergence.best_loss)} at step ${count(convergence.best_step)}`]);
    if (stability) rows.push(["stability", `scatter ${isNumber(stability.scatter) ? `${(stability.scatter * 100).toFixed(1)} %` : "–"}, ${count(stability.num_spikes)} spikes, ${count(stability.num_nonfinite)} losses that are no number, ${count(stability.num_skipped)} skipped steps`]);
    if (efficiency) rows.push(["efficiency", [`${percent(efficiency.goodput)} of the time in steps`, isNumber(efficiency.busy_share) ? `${percent(efficiency.busy_share)} of a step busy` : null, isNumber(efficiency.samples_per_s) ? `${short(efficiency.samples_per_s)} samples/s` : null,
      isNumber(efficiency.flops_per_s) ? `${short(efficiency.flops_per_s / 1e9)} GFLOP/s` : null, isNumber(efficiency.mfu) ? `MFU ${percent(efficiency.mfu)}` : null].filter(Boolean).join(", ")]);
    const { overfitting, gradients, learning_rate: rate } = risks || {};
    if (overfitting) rows.push(["overfitting", `${overfitting.verdict}: validation loss ${short(overfitting.last_loss)}, best ${short(overfitting.best_loss)} at step ${count(overfitting.best_step)}`]);
    if (gradients) rows.push(["gradients", `${gradients.verdict}: norm ${short(gradients.newest_norm)}, usually ${short(gradients.usual_norm)}; ${count(gradients.num_spikes)} spikes`]);
    if (rate) rows.push(["learning rate", `${rate.verdict}: ${short(rate.rate)}, loss ${short(rate.change_per_1000_steps)} ± ${short(rate.error)} in 1,000 steps`]);
    byId("course-section").hidden = !rows.length;
    table("course", [["", (row) => row[0]], ["", (row) => row[1]]], rows, "none");
  }

  function drawEnergy(energy) {
    byId("energy-section").hidden = !energy;
    if (!energy) return;
    const joules = (value) => (isNumber(value) ? (value >= 3.6e6 ? `${short(value / 3.6e6)} kWh` : value >= 1e3 ? `${short(value / 1e3)} kJ` : `${short(value)} J`) : "–");
    const rows = [["in all", `${joules(energy.total_j)} (${energy.label}), mean ${short(energy.mean_w)} W, most ${short(energy.peak_w)} W`], ["a sample", joules(energy.joules_per_sample)], ["a step", joules(energy.joules_per_step)],
      ["in steps", `${joules(energy.steps_j)}, of it waiting ${joules(energy.waiting_j)}`], ["start", joules(energy.start_j)], ["lost to failures", `${joules(energy.failures_j)}, steps done again ${joules(energy.undone_j)}, skipped ${joules(energy.skipped_j)}`],
      ["between and after steps", joules(energy.other_j)], ["idle", isNumber(energy.idle_w) ? `${short(energy.idle_w)} W, ${joules(energy.idle_j)}` : "not measured yet"], ["at the end", isNumber(energy.predicted_j) ? `${joules(energy.predicted_j)} ± ${joules(energy.predicted_error_j)}` : "–"],
      ...(energy.schedule ? [["now", `${energy.schedule.action}${energy.schedule.workers ? `, ${energy.schedule.workers} workers` : ""}: ${energy.schedule.reason}`], ["planned end", `${clock(energy.schedule.done_at)}, deadline ${clock(energy.schedule.deadline)}`], ["held", joules(energy.held_j)]] : []),
      ...energy.budgets.map((one) => [`budget: ${one.name}`, `${short(one.spent)} of ${short(one.limit)} ${one.unit} (${percent(one.spent / one.limit)})${one.action === "ok" ? "" : `: ${one.action}`}`]),
      ...(energy.carbon ? [["grid", `${short(energy.carbon.g_per_kwh)} g/kWh, ${energy.carbon.signal}, ${energy.carbon.basis}, ${energy.carbon.zone} by ${energy.carbon.source}${energy.carbon.is_stale ? ", stale" : ""}`]] : []),
      ["CO2", isNumber(energy.grams) ? `${short(energy.grams)} g` : "no intensity is known"], ["by rank", Object.entries(energy.by_rank).map(([rank, value]) => `${rank}: ${joules(value)}`).join(", ")],
      ...energy.meters.map((one) => [`node ${one.node}, ${one.meter}`, `${joules(one.joules)}, ${short(one.newest_w)} W, ${one.source}${one.is_measured ? "" : ", estimated"}${one.detail ? `: ${one.detail}` : ""}`]), ...energy.notes.map((note) => ["note", note])];
    table("energy", [["", (row) => row[0]], ["", (row) => row[1]]], rows, "none");
  }
  function drawFederated(run) {
    byId("federated-section").hidden = !run;
    if (!run) return;
    const told = (one) => Object.entries(one).map(([name, value]) => `${name} ${short(value)}`).join(", ");
    put("federated-total", `${count(run.num_rounds)} of ${count(run.num_planned)} rounds · ${count(run.num_updates)} updates, ${count(run.num_lost)} did not count · ${bytes(run.bytes_up)} up, ${bytes(run.bytes_down)} down${isNumber(run.epsilon) ? ` · ε ${short(run.epsilon)}` : ""}`);
    table("federated", [["round", (row) => count(row.round), true], ["clients", (row) => `${row.num_updates} of ${row.num_chosen}`], ["attempts", (row) => count(row.num_attempts), true], ["took", (row) => seconds(row.duration_s), true],
      ["up", (row) => bytes(row.bytes_up), true], ["down", (row) => bytes(row.bytes_down), true], ["ε", (row) => short(row.epsilon), true], ["figures", (row) => told(row.figures)], ["slowest links", (row) => Object.entries(row.links || {}).slice(0, 3).map(([client, rate]) => `${client} ${bytes(rate)}/s`).join(", ")], ["did not count", (row) => Object.entries(row.failures).map(([why, times]) => `${times} × ${why}`).join("; ")]], [...run.rounds].reverse(), "none yet");
  }
  function drawAlerts(alerts) {
    byId("alerts-section").hidden = !alerts.length;
    put("alerts", ...alerts.map((alert) => {
      const line = el("p", { class: ["critical", "error", "emergency"].includes(alert.severity) ? "bad" : "warn" }, `${alert.severity}: ${alert.name} – ${alert.message} (${clock(alert.time)})`);
      if (alert.is_acknowledged) line.append(" – acknowledged");
      else if (!document.getElementById("state")) {
        const button = el("button", { type: "button", "data-alert": alert.id }, "acknowledge");
        button.addEventListener("click", () => fetch("acknowledge", { method: "POST", headers: { "X-Torsh": "1", "Content-Type": "application/json" }, body: JSON.stringify({ alert: alert.id }) }));
        line.append(" ", button);
      }
      return line;
    }));
  }

  function happened(one) {
    const told = Object.entries(one).filter(([key, value]) => !["time", "rank", "type"].includes(key) && value !== null);
    return told.map(([key, value]) => `${key} ${isNumber(value) && !Number.isInteger(value) ? short(value) : value}`).join(", ");
  }

  function draw(state) {
    last = state;
    const job = state.job;
    document.title = `torsh ${job.run_id} – ${job.state}`;
    byId("run").textContent = job.run_id;
    const slow = state.stragglers.map((one) => `rank ${one.rank} is ${percent(one.slowdown)} slower than the others`)
      .concat((state.rank_risks || []).map((one) => `rank ${one.rank} has a risk of ${one.score.toFixed(2)}: ${one.detail}`)).join(", ");
    put("summary", el("span", { class: { failed: "bad", finished: "good" }[job.state] || "" }, job.state + (job.exit_code ? ` with exit code ${job.exit_code}` : "")),
      ` · ${job.command || "a job"} · ${count(job.world_size)} ${job.world_size === 1 ? "rank" : "ranks"} on ${count(job.num_nodes)} ${job.num_nodes === 1 ? "node" : "nodes"}${job.backend ? ` · ${job.backend}` : ""}${job.attempt ? ` · restart ${job.attempt}` : ""}`,
      ...(slow ? [el("span", { class: "warn" }, ` · ${slow}`)] : []));
    const parts = state.parts, total = PARTS.reduce((sum, part) => sum + (parts[part] || 0), 0);
    const shareOf = (part) => (isNumber(parts[part]) && total ? percent(parts[part] / total) : "–");
    const known = (name, value, text) => (isNumber(value) ? [[name, text(value)]] : []);
    const figures = [["step", isNumber(job.planned_steps) ? `${count(job.step)} of ${count(job.planned_steps)}` : count(job.step)], ...known("epochs done", job.epoch, count),
      ["loss", short(job.loss)], ...known("validation loss", job.validation_loss, short), ["samples/s", short(job.samples_per_s)], ["a step", seconds(total || null)],
      ["waiting for ranks", shareOf("wait")], ["waiting for data", shareOf("data")], ...known("GPUs busy", job.gpu_utilization, percent),
      ["running for", seconds(job.age_s)], ...known("left", job.remaining_s, seconds), ["last step", isNumber(job.last_step_age_s) ? `${seconds(Math.max(0, job.last_step_age_s))} ago` : "–"]];
    put("figures", ...figures.map(([name, value]) => el("li", {}, el("b", {}, value), el("span", {}, name))));
    drawAlerts(state.alerts);
    lineChart("loss", state.curve.step, state.curve.loss, "loss by step", short, pointsOf(state.curve.validation_step, state.curve.validation_loss), "validation loss");
    const hasRate = state.curve.samples_per_s.some(isNumber);
    byId("rate-title").textContent = `${hasRate ? "Throughput (samples/s)" : "Step time"}, after the first step`;
    if (hasRate) lineChart("rate", state.curve.step, state.curve.samples_per_s, "samples per second by step", short);
    else lineChart("rate", state.curve.step, state.curve.step_ms, "step time by step", (value) => `${short(value)} ms`);
    drawRanks(state);
    drawRank(state);
    put("parts", partsBar(parts));
    table("operations", [["operation", (row) => row.op], ["count", (row) => count(row.count), true], ["bytes", (row) => bytes(row.bytes), true], ["median", (row) => seconds(row.p50_s), true],
      ["p95", (row) => seconds(row.p95_s), true], ["per second", (row) => (isNumber(row.rate) ? `${bytes(row.rate)}/s` : "–"), true], ["errors", (row) => count(row.errors), true]], state.operations, "no operation was seen");
    byId("rates").hidden = !state.rates.length;
    table("rates", [["along", (row) => row.what], ["median", (row) => seconds(row.p50_s), true], ["p95", (row) => seconds(row.p95_s), true], ["p99", (row) => seconds(row.p99_s), true],
      ["per second", (row) => (isNumber(row.bytes_per_s) ? bytes(row.bytes_per_s) : isNumber(row.tokens_per_s) ? `${short(row.tokens_per_s)} tokens` : "–"), true],
      ["trend", (row) => (isNumber(row.trend) ? `${row.trend > 0 ? "+" : ""}${percent(row.trend)}` : "–"), true], ["size", (row) => percent(row.size), true]], state.rates, "none");
    drawTimeline(state.timeline);
    drawMesh(state.mesh, job.world_size);
    drawAdvice(state);
    drawCourse(state.course, state.risks);
    drawEnergy(state.energy);
    drawFederated(state.federated);
    table("checkpoints", [["time", (row) => clock(row.time)], ["what", (row) => row.action], ["step", (row) => count(row.step), true], ["took", (row) => seconds(row.duration_s), true],
      ["size", (row) => bytes(row.num_bytes), true], ["where", (row) => row.error || row.path || ""]], [...state.checkpoints].reverse(), "none yet");
    byId("anomalies-section").hidden = !state.anomalies.length;
    table("anomalies", [["time", (row) => clock(row.time)], ["kind", (row) => row.kind], ["severity", (row) => short(row.severity), true], ["what", (row) => row.message]], [...state.anomalies].reverse(), "none");
    byId("custom-section").hidden = !state.custom.length;
    table("custom", [["name", (row) => row.name], ["mean", (row) => `${short(row.mean)} ${row.unit}`, true], ["lowest", (row) => short(row.low), true], ["highest", (row) => short(row.high), true], ["what", (row) => row.help]], state.custom, "none");
    byId("nodes-section").hidden = !state.nodes.length;
    table("nodes", [["node", (row) => row.node], ["measured", (row) => Object.entries(row.values).map(([name, value]) => `${name.replaceAll("_", " ")} ${name.includes("bytes") ? bytes(value) : short(value)}`).join(" · ")]], state.nodes, "none");
    table("incidents", [["time", (row) => clock(row.time)], ["rank", (row) => (row.rank < 0 ? "launcher" : row.rank)], ["what", (row) => row.type], ["", happened]], [...state.incidents].reverse(), "nothing yet");
    document.body.dataset.drawn = "1";
  }

  function choose(target) {
    const rank = target.getAttribute && target.getAttribute("data-rank");
    if (rank === null || rank === undefined || !last) return;
    chosen = chosen === Number(rank) ? null : Number(rank);
    drawRanks(last);
    drawRank(last);
  }
  byId("ranks").addEventListener("click", (event) => choose(event.target));
  byId("ranks").addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(event.target); }
    const moves = { ArrowRight: 1, ArrowLeft: -1 };
    if (event.key in moves) {
      const cells = [...byId("ranks").querySelectorAll("[data-rank]")];
      const next = cells[cells.indexOf(event.target) + moves[event.key]];
      if (next) { event.preventDefault(); next.focus(); }
    }
  });
  for (const button of document.querySelectorAll("[data-by]")) {
    button.addEventListener("click", () => {
      colourBy = button.getAttribute("data-by");
      for (const other of document.querySelectorAll("[data-by]")) other.setAttribute("aria-pressed", String(other === button));
      if (last) drawRanks(last);
    });
  }

  const saved = document.getElementById("state");
  if (saved) draw(JSON.parse(saved.textContent));
  else {
    const source = new EventSource("live");
    // Nothing is redrawn under a pressed pointer: the press and its release would meet different elements.
    let isHeld = false, waiting = null;
    const release = () => { isHeld = false; if (waiting) { const state = waiting; waiting = null; draw(state); } };
    document.addEventListener("pointerdown", () => { isHeld = true; }, true);
    for (const name of ["pointerup", "pointercancel", "blur"]) window.addEventListener(name, () => setTimeout(release, 0), true);
    source.onmessage = (message) => { const state = JSON.parse(message.data); if (isHeld) waiting = state; else draw(state); };
    source.onerror = () => {
      if (last && !["finished", "failed"].includes(last.job.state)) byId("summary").append(" · connection lost");
      if (last && ["finished", "failed"].includes(last.job.state)) source.close();
    };
  }
})();
