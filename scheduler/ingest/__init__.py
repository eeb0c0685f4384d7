"""An upload becomes one file of images and the facts about them, or a clear refusal; never anything between.

staging       the body on its way to the disk, with its byte limit, and its parts
arrays      .npy and .npz -> pixels; nothing is ever unpickled
archives    .zip -> its image files, within bounds
labels      what may stand for a class
collect     all of the above, by kind of upload
inputs      the file of images: pixels where networks take small ones, else the users' own files
turns       who may decode now
"""
