"""An upload becomes one file of images and the facts about them, or a clear refusal; never anything between.

`staging` brings the body to the disk, with its byte limit and its parts. `arrays` reads .npy and .npz; nothing is ever
unpickled. `archives` reads the image files of a .zip, within bounds. `labels` checks the labels. `collect` joins all of
these, by kind of upload. `inputs` is the file of images: pixels if networks take small ones, else the users' own files.
`turns` gives the uploads fair turns at the decoders.
"""
