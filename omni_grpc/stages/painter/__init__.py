"""A small diffusion transformer that draws captions of a fixed grammar, 32x32 RGB.

`captions`  what can be asked for: the grammar, its parser (no torch)
`shapes`    what a caption looks like: colours, outlines, the renderer
`model`     the transformer: captions → conditioning, noisy pictures → clean pictures
`sampler`   noise → picture, one denoise step at a time for any mix of requests
`judge`     which caption a picture shows

Trained by `training/painter`, which also says how well it draws.
"""
