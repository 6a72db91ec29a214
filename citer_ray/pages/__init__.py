"""Templates of HTML pages; `report_pages.py` fills them."""
