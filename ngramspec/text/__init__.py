"""Between text and token ids.

Texts enter and checked ids leave (`encoding`); ids enter one by one and the text that may be shown leaves (`decoding`).
What a text must look like becomes masks over tokens (`grammar`); calls of tools are known by their form (`tool_calls`, `call_reader`).
It does not know what a request, a model or a draft is.
"""
