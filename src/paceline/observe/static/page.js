// Draws the pictures. In a report they are in the page; on the live page they come one after another.
"use strict";
const paceline = (() => {
  const settings = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

  function draw(picture) {
    const figure = document.getElementById(picture.name);
    const place = figure && figure.querySelector(".plot");
    if (place) return Plotly.react(place, picture.data, picture.layout, settings);
  }

  const everyPlot = (act) => document.querySelectorAll(".plot.js-plotly-plot").forEach((place) => act(place));

  // Paper is narrower than the window: drawn again for it, with room for a legend of a line a name, and back afterwards.
  const named = (place) => place._fullData.filter((trace) => trace.showlegend && trace.visible === true).length;

  function fit(place, size, height) {
    place.style.height = `${height}px`;
    return Plotly.relayout(place, { ...size, height });
  }

  addEventListener("beforeprint", () => everyPlot((place) => {
    place.dataset.height ??= place.offsetHeight;  // a window that changed its size has taken it out of the layout
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
