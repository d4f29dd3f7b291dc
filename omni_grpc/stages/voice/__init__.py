"""Speech in two stages, cut out of the hibari model.

`clauses`   text deltas → speakable clauses
`acoustic`  clause → frames of conditioning and fundamental frequency
`vocoder`   frames → samples, in a stream
`build`     makes both stages' models from the installed package
"""
