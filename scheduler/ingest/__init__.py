"""An upload becomes one file of raw pixels and the facts about them, or a clear refusal; never anything between.

spool       the body on its way to the disk, with its byte limit, and its parts
images      one PNG, JPEG or WebP file -> pixels
arrays      .npy and .npz -> pixels; nothing is ever unpickled
archives    .zip -> its image files, within bounds
labels      what may stand for a class
collect     all of the above, by kind of upload
"""
