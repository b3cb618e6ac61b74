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

  // Paper is narrower than the window: drawn again for it, and back afterwards.
  addEventListener("beforeprint", () => everyPlot((place) => Plotly.relayout(place, { width: 680 })));
  addEventListener("afterprint", () => everyPlot((place) => Plotly.relayout(place, { width: null, autosize: true })));

  const given = document.getElementById("figures");
  if (given) {
    for (const picture of JSON.parse(given.textContent)) draw(picture);
    document.documentElement.dataset.drawn = "yes";
  }
  return { draw };
})();
