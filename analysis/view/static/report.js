// Draws the charts of a report from the data beside them.
"use strict";

for (const place of document.querySelectorAll(".chart")) {
  const data = place.querySelector("script.chart-data");
  Bokeh.embed.embed_item(JSON.parse(data.textContent), place);
}
