-- Marks a server as suspected until its next heartbeat, or until its lease has ended. Returns 1 if it was not before.
-- ARGV: server id, lease in ms.
if redis.call('HEXISTS', SERVERS, ARGV[1]) == 0 then return 0 end
if not redis.call('SET', suspect_key(ARGV[1]), '1', 'PX', ARGV[2], 'NX') then return 0 end
changed(ARGV[1], STATE)
return 1
