"""Reports: a web page of one file that shows runs, from disk or while they train.

`collect.py` reads what runs have written, `page.py` writes the page, `live.py` serves it, and `assets/` is the page
itself: HTML, CSS and JavaScript as a browser takes them.
"""
