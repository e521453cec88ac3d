"""An advice: ranked candidates and a recommendation, on the terminal and as a page."""
