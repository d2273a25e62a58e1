"""Convolution, pooling, norms, attention and linear layers for many clients at once, under a loss written for one.

    with StackedOps(torch.bfloat16):
        losses = torch.func.vmap(loss)(params, batches)

`vmap` turns a convolution with a weight per client into a grouped one, which is slow everywhere. Here it becomes one
kernel over all clients on a GPU, and a loop over the clients on the CPU. A client's result has the same bits however
many others are stacked with it. `mode` dispatches calls to operations; each family has a file.

Memory is [S, n, h, w, c] throughout: elementwise functions keep that layout, so nothing is copied between layers.
"""
