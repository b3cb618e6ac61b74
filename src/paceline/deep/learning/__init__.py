"""Learning the deep forecast, from traces and run logs or in the background of a run. See docs/forecast.md."""
