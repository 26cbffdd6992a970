"""llama.cpp's own routes, for the editors that speak them: /infill, /completion, /tokenize, /detokenize, /props, /slots.

Requests in llama.cpp's words enter and become inputs for the admission queue; what the engine wrote leaves in llama.cpp's words.
It does not know OpenAI's words, nor how requests are admitted and run.
"""
