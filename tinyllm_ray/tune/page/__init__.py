"""The report page: what a study or a run left, as one HTML file.

`study`, `spending`, `findings` say what there is to show, without drawing; `charts` draws it; `write` makes the file.
"""
