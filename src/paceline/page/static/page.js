// Draws the pictures. In a report they are in the page; on the live page they come one after another.
"use strict";
const paceline = (() => {
  const settings = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

  const drawn = new Map();

  // A narrow window shows one line of the legend per name: the picture grows by these lines.
  const narrow = matchMedia("(max-width: 640px)");

  function roomy(picture) {
    const names = picture.data.filter((trace) => trace.showlegend !== false).length;
    const height = (picture.layout.height ?? 300) + (narrow.matches && names > 1 ? 20 * names : 0);
    return { ...picture.layout, height };
  }

  function draw(picture) {
    drawn.set(picture.name, picture);
    const figure = document.getElementById(picture.name);
    const place = figure && figure.querySelector(".plot");
    if (!place) return;
    const layout = roomy(picture);
    place.style.height = `${layout.height}px`;
    return Plotly.react(place, picture.data, layout, settings);
  }

  narrow.addEventListener("change", () => drawn.forEach((picture) => draw(picture)));

  const everyPlot = (act) => document.querySelectorAll(".plot.js-plotly-plot").forEach((place) => act(place));

  // Paper is narrower than the window: drawn again for it, with one line of the legend per name, and back afterwards.
  const named = (place) => place._fullData.filter((trace) => trace.showlegend && trace.visible === true).length;

  function fit(place, size, height) {
    place.style.height = `${height}px`;
    return Plotly.relayout(place, { ...size, height });
  }

  addEventListener("beforeprint", () => everyPlot((place) => {
    place.dataset.height ??= place.offsetHeight;  // a resized window has removed the height from the layout
    fit(place, { width: 680 }, Number(place.dataset.height) + 20 * named(place));
  }));
  addEventListener("afterprint", () => everyPlot((place) => {
    fit(place, { width: null, autosize: true }, Number(place.dataset.height));
    delete place.dataset.height;
  }));

  const given = document.getElementById("figures");
  if (given) {
    for (const picture of JSON.parse(given.textContent)) draw(picture);
    document.documentElement.dataset.drawn = "yes";
  }
  return { draw };
})();
