"""Between text and token ids.

Texts enter and checked ids leave (`encoding`); ids enter one by one and the text that may be shown leaves (`decoding`).
It does not know what a request, a model or a draft is.
"""
