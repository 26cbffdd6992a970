"""The packed rows of one forward pass (`batch`), and from their logits to tokens: sampler, top-k, verification of trees. Numpy only."""
